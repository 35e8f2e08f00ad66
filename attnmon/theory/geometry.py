"""Distance d~ of a selected set of keys and Theorem 1(1) of the paper (arXiv 2508.17821, section 3).

Notation: p weights of a row over its n visible keys, x_i their vectors, I_N the N keys of the largest weights (of
equal ones the lowest index), s = sum over I_N of p_j x_j, not renormalized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmon.errors import AttnmonError
from attnmon.theory.rows import TokenRows, check_top_n, ranking, selection, top_n_selection


def distance(weights: Tensor, tokens: Tensor, selected: Tensor, visible: Tensor | None = None) -> Tensor:
    """d~ = sum over the keys i outside the set of |p_i x_i - s| (a sum of norms), for any selected set.

    Args:
        weights: [..., n].
        tokens: [n, E] shared by all rows, or [..., n, E].
        selected: bool, broadcastable to [..., n]; hidden keys in it do not count.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the weights' dtype, >= 0; 0 where no visible key is outside.

    Raises:
        AttnmonError: the shapes do not fit, or a mask is not bool.
    """
    rows = TokenRows(weights, tokens, visible)
    if selected.dtype != torch.bool:
        raise AttnmonError(f"selected must be a bool tensor, not {selected.dtype}")
    inside = selected.expand(rows.p.shape)
    return set_distance(rows, inside if rows.visible is None else inside & rows.visible).to(rows.dtype)


def top_n_distance(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """d~ of I_N, the N keys with the largest weights; arguments and result as for ``distance``."""
    rows = TokenRows(weights, tokens, visible)
    return set_distance(rows, top_n_selection(rows, top_n)).to(rows.dtype)


def distance_bound(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """Theorem 1(1): an upper bound of ``top_n_distance``. True for top-N sets only.

        d~ <= o d1 + max_{I_N} |x| (a (n - N) - o),    d1 = max |x_i - x_j| over i outside, j inside,

    a and o the weight inside and outside (o = 1 - a without a sink). It needs a >= p_i for every i outside, which a
    top-N set has; for arbitrary sets it is false as printed. Counterexample: n = 3, p = (0.8, 0.1, 0.1), all x equal
    and of unit length, set {3}: d~ = 0.7 against (1 - 0.1) 0 + 0.1 * 2 - 0.9 = -0.7.

    Args:
        weights, tokens, top_n, visible: as for ``top_n_distance``.

    Returns:
        [...] of the weights' dtype; 0 for rows with n <= N, where d~ is 0.
    """
    rows = TokenRows(weights, tokens, visible)
    count = min(rows.p.shape[-1], check_top_n(top_n) + 1)
    top, index = ranking(rows, count)
    inside = selection(rows, index, top_n)
    if rows.shared:
        (furthest,) = furthest_pairs(rows, index, [top_n], [inside], pair_squares(rows.x))
    else:
        furthest = _furthest_pair_dense(rows, index[..., :top_n], inside)
    return bound_from(rows, top, index, inside, top_n, furthest).to(rows.dtype)


def set_distance(rows: TokenRows, inside: Tensor) -> Tensor:
    """d~ of the set ``inside`` (visible keys), float64 [...]."""
    outside = rows.outside(inside)
    _, lengths = rows.offsets(rows.p, rows.combine(torch.where(inside, rows.p, 0.0)), outside)
    return torch.where(outside, lengths, 0.0).sum(-1)


def bound_from(rows: TokenRows, top: Tensor, index: Tensor, inside: Tensor, top_n: int, furthest: Tensor) -> Tensor:
    """The right side of Theorem 1(1) from a row's ranking and d1, float64 [...]."""
    mass = top[..., :top_n].sum(-1)
    # the weight outside as a sum of its own: 1 - a cancels in nearly one-hot rows
    rest = torch.where(inside, 0.0, rows.p).sum(-1)
    norms = rows.squares.sqrt().expand(rows.p.shape).gather(-1, index[..., :top_n]).amax(-1)
    bound = rest * furthest + norms * (mass * (rows.n - top_n) - rest)
    return torch.where(rows.n > top_n, bound, 0.0)


def pair_squares(tokens: Tensor) -> Tensor:
    """|x_i - x_j|^2 of every pair of [n, E], float64 [n, n].

    The cloud is centerd first: vectors that share a large part would cancel against it.
    """
    x = tokens.double() - tokens.double().mean(0)
    squares = x.square().sum(-1)
    gram = x @ x.T
    return gram.mul_(-2.0).add_(squares).add_(squares[:, None]).clamp_(min=0.0)


def furthest_pairs(
    rows: TokenRows, index: Tensor, top_ns: Sequence[int], inside: Sequence[Tensor], squares: Tensor
) -> list[Tensor]:
    """d1 = max |x_i - x_j| over i outside and j inside I_N, for rows that share their keys, for several N at once.

    A running maximum over the ranks: each further N costs only the ranks it adds.

    Args:
        rows: of shared tokens.
        index: their ranking, [..., K].
        top_ns, inside: N in ascending order, and I_N of each.
        squares: ``pair_squares`` of the tokens.

    Returns:
        float64 [...] for each N; meaningless where n <= N.
    """
    flat = index.reshape(-1, index.shape[-1])
    reach = torch.zeros(flat.shape[0], squares.shape[0], dtype=squares.dtype, device=squares.device)
    found, rank = [], 0
    for top_n, chosen in zip(top_ns, inside, strict=True):
        while rank < min(top_n, flat.shape[-1]):
            torch.maximum(reach, squares.index_select(0, flat[:, rank]), out=reach)
            rank += 1
        outside = rows.outside(chosen)
        found.append(torch.where(outside, reach.view(outside.shape), 0.0).amax(-1).sqrt())
    return found


def _furthest_pair_dense(rows: TokenRows, index: Tensor, inside: Tensor) -> Tensor:
    """d1 for rows with keys of their own."""
    width = rows.x.shape[-1]
    chosen = rows.x.gather(-2, index[..., None].expand(*index.shape, width))
    gaps = torch.cdist(rows.x, chosen, compute_mode="donot_use_mm_for_euclid_dist")  # [..., n, N]
    return torch.where(rows.outside(inside), gaps.amax(-1), -math.inf).amax(-1)
