"""Distance d~ of a selected set of keys and Theorem 1(1) of the paper (arXiv 2508.17821, section 3).

Notation: p weights of a row over its n visible keys, x_i their vectors, I_N the N keys of the largest weights (of
equal ones the lowest index), s = sum over I_N of p_j x_j, not renormalized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnmon.checks import check_whole
from attnmon.errors import AttnmonError
from attnmon.theory.rows import TokenRows, ranking, selection, top_n_selection


def distance(weights: Tensor, tokens: Tensor, selected: Tensor, visible: Tensor | None = None) -> Tensor:
    """Compute d~ = sum over the keys i outside a set of |p_i x_i - s| (a sum of norms), for any selected set.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        selected: bool, broadcastable to [..., n]; hidden keys in it do not count.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the weights' dtype, >= 0; 0 where no visible key is outside.

    Raises:
        AttnmonError: the shapes do not fit, a mask is not bool, or a number is not finite.

    Source: paper, section 3, definition of d~.
    """
    rows = TokenRows(weights, tokens, visible)
    if selected.dtype != torch.bool:
        raise AttnmonError(f"selected must be a bool tensor, not {selected.dtype}")
    inside = selected.expand(rows.p.shape)
    return set_distance(rows, inside if rows.visible is None else inside & rows.visible).to(rows.dtype)


def top_n_distance(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """Compute d~ of I_N, the N keys with the largest weights: the live metric ``distance``.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        top_n: N, at least 1.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the weights' dtype, >= 0; 0 for rows with n <= N.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` is no whole number of at least 1.

    Source: paper, section 3 and Algorithm 1.
    """
    rows = TokenRows(weights, tokens, visible)
    return set_distance(rows, top_n_selection(rows, top_n)).to(rows.dtype)


def distance_bound(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """Compute the upper bound of ``top_n_distance`` of Theorem 1(1). True for top-N sets only.

        d~ <= o d1 + max_{I_N} |x| (a (n - N) - o),    d1 = max |x_i - x_j| over i outside, j inside,

    where a and o are the weight inside and outside (o = 1 - a without a sink). The proof needs a >= p_i for every i
    outside, which a top-N set has. For arbitrary sets the statement is false as printed. Counterexample: n = 3,
    p = (0.8, 0.1, 0.1), all x equal and of unit length, set {3}: d~ = 0.7 against (1 - 0.1) 0 + 0.1 * 2 - 0.9 = -0.7.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        top_n: N, at least 1.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the weights' dtype; 0 for rows with n <= N, where d~ is 0.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` is no whole number of at least 1.

    Source: paper, Theorem 1(1); the form for rows with a sink is ours.
    """
    check_whole("top_n", top_n)
    rows = TokenRows(weights, tokens, visible)
    top, index = ranking(rows, min(rows.p.shape[-1], top_n + 1))
    inside = selection(rows, index, top_n)
    if rows.shared:
        (furthest,) = furthest_pairs(rows, index, [top_n], [inside], pair_squares(rows.x))
    else:
        furthest = _furthest_pair_dense(rows, index[..., :top_n], inside)
    return bound_from(rows, top, index, inside, top_n, furthest).to(rows.dtype)


def set_distance(rows: TokenRows, inside: Tensor) -> Tensor:
    """Compute d~ of a set of visible keys.

    Args:
        rows: weights and vectors.
        inside: bool [..., n], the set.

    Returns:
        float64 [...].

    Source: paper, section 3, definition of d~.
    """
    outside = rows.outside(inside)
    _, lengths = rows.offsets(rows.p, rows.combine(torch.where(inside, rows.p, 0.0)), outside)
    return torch.where(outside, lengths, 0.0).sum(-1)


def bound_from(rows: TokenRows, top: Tensor, index: Tensor, inside: Tensor, top_n: int, furthest: Tensor) -> Tensor:
    """Compute the right side of Theorem 1(1) from a row's ranking and d1.

    Args:
        rows: weights and vectors.
        top: float64 [..., K], the K >= N largest weights of ``ranking``.
        index: int64 [..., K], their keys.
        inside: bool [..., n], I_N.
        top_n: N.
        furthest: float64 [...], d1.

    Returns:
        float64 [...]; 0 where n <= N.

    Source: paper, Theorem 1(1); the form for rows with a sink is ours.
    """
    mass = top[..., :top_n].sum(-1)
    # the weight outside as a sum of its own: 1 - a cancels in nearly one-hot rows
    rest = torch.where(inside, 0.0, rows.p).sum(-1)
    norms = rows.squares.sqrt().expand(rows.p.shape).gather(-1, index[..., :top_n]).amax(-1)
    bound = rest * furthest + norms * (mass * (rows.n - top_n) - rest)
    return torch.where(rows.n > top_n, bound, 0.0)


def pair_squares(tokens: Tensor) -> Tensor:
    """Compute |x_i - x_j|^2 of every pair of vectors.

    The vectors are centered first: a large part that all of them share would cost the differences their digits.

    Args:
        tokens: float [n, E].

    Returns:
        float64 [n, n], >= 0.

    Source: ours.
    """
    x = tokens.double() - tokens.double().mean(0)
    squares = x.square().sum(-1)
    gram = x @ x.T
    return gram.mul_(-2.0).add_(squares).add_(squares[:, None]).clamp_(min=0.0)


def furthest_pairs(
    rows: TokenRows, index: Tensor, top_ns: Sequence[int], inside: Sequence[Tensor], squares: Tensor
) -> list[Tensor]:
    """Compute d1 = max |x_i - x_j| over i outside and j inside I_N, for several N at once.

    The maximum runs over the ranks, so each further N costs only the ranks that it adds.

    Args:
        rows: weights and vectors; all rows share their keys.
        index: int64 [..., K], the keys of ``ranking``.
        top_ns: N in ascending order.
        inside: bool [..., n] for each N, I_N.
        squares: float64 [n, n], ``pair_squares`` of the tokens.

    Returns:
        float64 [...] for each N; meaningless where n <= N.

    Source: paper, Theorem 1(1), for d1.
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
    """Compute d1 for rows with keys of their own."""
    width = rows.x.shape[-1]
    chosen = rows.x.gather(-2, index[..., None].expand(*index.shape, width))
    gaps = torch.cdist(rows.x, chosen, compute_mode="donot_use_mm_for_euclid_dist")  # [..., n, N]
    return torch.where(rows.outside(inside), gaps.amax(-1), -math.inf).amax(-1)
