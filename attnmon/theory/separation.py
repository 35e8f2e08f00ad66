"""Separability of the selected keys and Theorem 2 of the paper (arXiv 2508.17821, section 3).

D_i = |p_i x_i - s| with s = sum over I_N of p_j x_j; r = least D outside I_N. A selected key is separated if D_i < r,
strictly: with the paper's closed ball the nearest outsider lies on the boundary and no key would ever be separated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attnmon.checks import check_whole
from attnmon.theory.geometry import pair_squares
from attnmon.theory.rows import TokenRows, ranking, selection


@dataclass(frozen=True, slots=True, eq=False)
class Separation:
    """What one N says of each row; every field is [...] of the weights' dtype, NaN for rows with n <= N.

    Attributes:
        fraction: N_s / N in [0, 1], the live metric ``separability``; 1 for N = 1.
        radius: r >= 0.
        lower_bound: Theorem 2, lower: 1 - (1/(r N)) sum over I_N of D_i <= fraction. True. May be negative; -inf where
            r = 0, when nothing is claimed.
        lower_bound_xi: the paper's weaker bound, with xi_i >= D_i in place of D_i. True. M is the largest |x| of the
            row, delta the least distance between two of its visible keys.
        paper_expression: (1/N) sum exp(-(r - xi_i)^2 / (16 M^2)): the paper's expression (not a bound). Theorem 2's
            "upper bound" is false as printed: p = (0.46, 0.46, 0.04, 0.04) and x = (1, 0), (0, 1), (-1, 0), (0, -1)
            give a fraction of 1 against 0.997. It is never below exp(-1/16) = 0.939, so no "at most 80 %" follows.
        precision: N / (N + number of outsiders with D <= max D inside), in (0, 1].
        recall: the same as ``fraction``.
        f_score: harmonic mean of precision and recall; 0 where recall is 0.
        margin: r - max D inside; positive exactly where all N are separated (N = 1: r).
        retained_mass: sum of p over I_N, in [0, 1].

    Source: paper, section 3 and Theorem 2, for all up to ``paper_expression``; the authors' later work for the others.
    """

    fraction: Tensor
    radius: Tensor
    lower_bound: Tensor
    lower_bound_xi: Tensor
    paper_expression: Tensor
    precision: Tensor
    recall: Tensor
    f_score: Tensor
    margin: Tensor
    retained_mass: Tensor

    def to(self, dtype: torch.dtype) -> Separation:
        """Convert every field to another dtype."""
        return Separation(*(getattr(self, field.name).to(dtype) for field in fields(self)))


def separability(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Separation:
    """Compute N_s / N with Theorem 2's bounds, precision, recall, F, margin and retained mass.

    Stronger separation often goes with worse loss: no field is a quality score.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        top_n: N, at least 1.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        One number a row for each measure; each field says whether it is a bound.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` is no whole number of at least 1.

    Source: paper, section 3 and Theorem 2; the authors' later work for precision, F, margin and retained mass.
    """
    check_whole("top_n", top_n)
    rows = TokenRows(weights, tokens, visible)
    top, index = ranking(rows, min(rows.p.shape[-1], top_n + 1))
    inside = selection(rows, index, top_n)
    return separation(rows, top, index, inside, top_n, least_pair(rows))[0].to(rows.dtype)


def separation(
    rows: TokenRows, top: Tensor, index: Tensor, inside: Tensor, top_n: int, delta_square: Tensor
) -> tuple[Separation, Tensor]:
    """Compute the measures of one N from a row's ranking, and d~ from the same distances.

    Args:
        rows: weights and vectors.
        top: float64 [..., K], the K >= N largest weights of ``ranking``.
        index: int64 [..., K], their keys.
        inside: bool [..., n], I_N.
        top_n: N.
        delta_square: float64 [...], ``least_pair``.

    Returns:
        The measures, and d~ [...]; all float64.

    Source: paper, section 3 and Theorem 2; the authors' later work for precision, F, margin and retained mass.
    """
    outside = rows.outside(inside)
    s = rows.combine(torch.where(inside, rows.p, 0.0))
    order, lengths = rows.offsets(rows.p, s, outside)
    distance = torch.where(outside, lengths, 0.0).sum(-1)
    valid = rows.n > top_n

    chosen = index[..., :top_n]
    near, near_order = lengths.gather(-1, chosen), order.gather(-1, chosen)
    bar = torch.where(outside, order, math.inf).amin(-1)
    radius = torch.where(outside, lengths, math.inf).amin(-1)
    if top_n == 1:  # the selected key is s itself
        near = torch.zeros_like(near)
        fraction = torch.ones_like(radius)
        intruders = (outside & (lengths <= 0.0)).sum(-1)
    else:
        fraction = (near_order < bar[..., None]).sum(-1).double() / top_n
        intruders = (outside & (order <= near_order.amax(-1, keepdim=True))).sum(-1)
    precision = top_n / (top_n + intruders.double())
    f_score = 2.0 * precision * fraction / (precision + fraction)

    xi = _xi(top[..., :top_n], rows.largest_norm, delta_square)
    reach = (radius * top_n).where(radius > 0, math.nan)
    lower = (1.0 - near.sum(-1) / reach).nan_to_num(nan=-math.inf)
    lower_xi = (1.0 - xi.sum(-1) / reach).nan_to_num(nan=-math.inf)
    scale = (16.0 * rows.largest_norm.square())[..., None]
    paper = torch.exp(-((radius[..., None] - xi).square() / scale)).mean(-1)

    measured = Separation(
        fraction=fraction,
        radius=radius,
        lower_bound=lower,
        lower_bound_xi=lower_xi,
        paper_expression=paper,
        precision=precision,
        recall=fraction,
        f_score=f_score,
        margin=radius - near.amax(-1),
        retained_mass=top[..., :top_n].sum(-1),
    )
    checked = (torch.where(valid, getattr(measured, field.name), math.nan) for field in fields(measured))
    return Separation(*checked), distance


def _xi(top: Tensor, largest_norm: Tensor, delta_square: Tensor) -> Tensor:
    """Compute xi_i, xi_i^2 = M^2 sum p_j^2 + (M^2 - delta^2/2) sum_{j != k} p_j p_k over I_N without i; [..., N]."""
    squares = top.square()
    mass = top.sum(-1, keepdim=True) - top
    square = squares.sum(-1, keepdim=True) - squares
    # the largest weight is nearly all of a sharp row's sum: what is left without it must not be a difference
    mass[..., 0] = top[..., 1:].sum(-1)
    square[..., 0] = squares[..., 1:].sum(-1)
    m_square = largest_norm.square()[..., None]
    pairs = (mass.square() - square).clamp(min=0.0)
    return (m_square * square + (m_square - 0.5 * delta_square[..., None]) * pairs).clamp(min=0.0).sqrt()


def least_pair(rows: TokenRows, squares: Tensor | None = None) -> Tensor:
    """Find delta^2, the least |x_i - x_j|^2 between two visible keys of each row.

    Rows that share their keys and see a prefix of them (causal rows) cost one pass over all pairs together; other
    masks cost one pass a row.

    Args:
        rows: weights and vectors.
        squares: float64 [n, n], ``pair_squares`` of the shared tokens, if it is known.

    Returns:
        float64 [...]; inf for n < 2.

    Source: paper, Theorem 2, for delta.
    """
    if not rows.shared:
        flat = rows.x.flatten(0, -3)
        masks = None if rows.visible is None else rows.visible.reshape(-1, flat.shape[1])
        each = [_least_of(pair_squares(x), None if masks is None else masks[i]) for i, x in enumerate(flat)]
        return torch.stack(each).view(rows.n.shape)
    squares = pair_squares(rows.x) if squares is None else squares
    if rows.visible is None:
        return _least_of(squares, None).expand(rows.n.shape)
    length = squares.shape[0]
    prefix = torch.arange(length, device=squares.device) < rows.n[..., None]
    if torch.equal(prefix, rows.visible):
        below = torch.ones_like(squares, dtype=torch.bool).tril_(-1)
        nearest = torch.where(below, squares, math.inf).amin(-1).cummin(0).values  # over pairs within keys 0 ... i
        return torch.where(rows.n > 0, nearest[(rows.n.long() - 1).clamp(min=0)], math.inf)
    masks = rows.visible.reshape(-1, length)
    return torch.stack([_least_of(squares, mask) for mask in masks]).view(rows.n.shape)


def _least_of(squares: Tensor, mask: Tensor | None) -> Tensor:
    """Find the least entry off the diagonal, among the keys of the mask only."""
    pairs = squares if mask is None else squares[mask][:, mask]
    if pairs.shape[0] < 2:
        return squares.new_tensor(math.inf)
    return pairs.masked_fill(torch.eye(pairs.shape[0], dtype=torch.bool, device=pairs.device), math.inf).amin()
