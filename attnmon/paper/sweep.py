"""d~ of nested sets for many sizes N at once, which makes experiment 3 a matter of minutes.

The sets of a row are the first N keys of one order: that of the weights (I_N) or a random one (then every set is a
uniform draw of N keys). Each size costs two matrix products and one pass over a block of rows that stays in the cache;
under a causal mask a block reads only the keys up to its last row. Arithmetic is float32: a distance comes from its
excess over |s|^2, which loses digits only for single keys that lie almost at s, and those add next to nothing to the
sum. ``attnmon.theory.geometry`` is the definition; the tests hold this file to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 128  # rows


def weight_ranks(weights: Tensor, visible: Tensor) -> Tensor:
    """Rank the keys of each row by weight, 0 for the largest; of equal weights the lowest index comes first.

    Args:
        weights: float [R, n], p.
        visible: bool [R, n].

    Returns:
        int32 [R, n]; -1 at hidden keys.

    Source: paper, section 3, definition of I_N; the order of ties is ours.
    """
    order = torch.where(visible, weights, -1.0).argsort(dim=-1, descending=True, stable=True)
    return _ranks(order, visible)


def random_ranks(visible: Tensor, generator: torch.Generator) -> Tensor:
    """Rank the visible keys of each row at random.

    Args:
        visible: bool [R, n].
        generator: of the device of ``visible``; its state moves on.

    Returns:
        int32 [R, n]; -1 at hidden keys.

    Source: paper, Theorem 1(2), for random sets; that the sets of one draw are nested is ours.
    """
    lots = torch.rand(visible.shape, generator=generator, device=visible.device)
    return _ranks(torch.where(visible, lots, 2.0).argsort(dim=-1), visible)


def nested_distances(weights: Tensor, tokens: Tensor, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute d~ of each row's first N keys, for every N of a list.

    Args:
        weights: float32 [R, n], p, 0 at hidden keys; causal: row i reads keys 0 ... i + n - R at most.
        tokens: float32 [n, E], x.
        ranks: int32 [R, n], order of the keys, -1 at hidden keys.
        sizes: N, each at least 1.

    Returns:
        float64 [sizes, R]; 0 where a row sees no more than N keys.

    Source: paper, section 3, definition of d~; Algorithms 1 to 3.
    """
    rows, keys = weights.shape
    found = torch.zeros(len(sizes), rows, dtype=torch.float64, device=weights.device)
    squares = tokens.square().sum(-1)
    for first in range(0, rows, _BLOCK):
        last = min(first + _BLOCK, rows)
        reach = keys - rows + last
        p, rank, x = weights[first:last, :reach], ranks[first:last, :reach], tokens[:reach]
        own = p * squares[:reach]
        for index, size in enumerate(sizes):
            if size >= reach:
                continue
            inside = rank < size  # or hidden
            s = (p * inside) @ x
            pull = torch.addmm(own, s, x.T, alpha=-2.0)  # p |x|^2 - 2 s.x
            square = torch.addcmul(s.square().sum(-1, keepdim=True), p, pull)
            lengths = square.clamp_(min=0.0).sqrt_().masked_fill_(inside, 0.0)
            found[index, first:last] = lengths.sum(-1)
    return found


def expected_distances(
    weights: Tensor, tokens: Tensor, visible: Tensor, sizes: Sequence[int], draws: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Estimate E[d~] of each row for every N by Monte Carlo, with the variance of the estimate.

    Args:
        weights: float32 [R, n], p, 0 at hidden keys; causal: row i reads keys 0 ... i + n - R at most.
        tokens: float32 [n, E], x.
        visible: bool [R, n].
        sizes: N, each at least 1.
        draws: random orders a row, at least 2. The sets of one order are nested, so the estimates of different N are
            not independent; those of different rows are.
        seed: of a generator of its own.

    Returns:
        float64 [sizes, R] each: mean over draws, and squared standard error (sample variance / draws).

    Source: paper, Algorithms 1 to 3, which compare d~ with E[d~]; the estimator is ours.
    """
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    drawn = torch.stack(
        [nested_distances(weights, tokens, random_ranks(visible, generator), sizes) for _ in range(draws)]
    )
    return drawn.mean(0), drawn.var(0) / draws


def _ranks(order: Tensor, visible: Tensor) -> Tensor:
    places = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand(order.shape)
    ranks = torch.empty(order.shape, dtype=torch.int32, device=order.device).scatter_(-1, order, places)
    return ranks.masked_fill_(~visible, -1)
