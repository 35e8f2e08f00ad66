"""The softmax Jacobian in four norms, their sharp bounds, and the finite difference (paper, section 4).

"The paper" is arXiv 2508.17821. J = (diag p - p p^T) / tau is the derivative of the weights with respect to the
standard scaled logits l = tau z, where tau = 1 for the usual scale 1 / sqrt(d). ``weights`` below are p over the keys,
[..., n], hidden keys being 0; with a learned sink they sum to less than one and ``sink`` is its weight, [...].

| norm | sharp bound | reached at |
|---|---|---|
| largest absolute entry | 1 / (4 tau) | p_i = 1/2 |
| spectral | 1 / (2 tau) | p = (1/2, 1/2, 0, ...) |
| Frobenius | 1 / (2 tau) | p = (1/2, 1/2, 0, ...) |
| infinity (largest row sum; the 1-norm too, J is symmetric) | 1 / (2 tau) | p_i = 1/2 |

The paper's "spectral norm <= min(1 / (4T), sqrt 2)" is false as printed: at p = (1/2, 1/2) the norm is 1 / (2T).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmon.errors import AttnmonError
from attnmon.stats.directions import direction_start, direction_windows
from attnmon.stats.streaming.eigenvalue import EIGENVALUE_CANDIDATES, SecularRoot
from attnmon.stats.streaming.top_keys import largest, leading
from attnmon.theory.rows import visible_mask

_REFINEMENTS = 4  # quadratic convergence: from the live solver's float32 accuracy to that of float64
_OVERFLOWS = 80.0  # of a move of the logits: expm1 of it and its products would leave float32


def spectral_norm(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """lambda_max(diag p - p p^T) / tau, [...] of the weights' dtype, in [0, 1/(2 tau)].

    The solver of the live metric ``jacobian``, iterated to float64: O(n), no cancellation in nearly one-hot rows. It
    carries no gradient: its root is found in place.
    """
    _check_tau(tau)
    p = weights.detach().double()
    sink = None if sink is None else sink.detach()
    few = min(p.shape[-1], EIGENVALUE_CANDIDATES)
    index = largest(p, few, few, 0.0)[1]
    top = leading(p.gather(-1, index))
    first = top[0].clamp(min=torch.finfo(p.dtype).tiny)
    e_top = (top / first).clamp(max=1.0)
    if few == 1:
        e_top, gap = torch.cat([e_top, torch.zeros_like(e_top)]), torch.ones_like(first)
    else:
        gap = (first - top[1]) / first
    tail = (p / first[..., None]).clamp(max=1.0).scatter(-1, index, 0.0)
    outcome = None if sink is None else sink.double() / first
    solver = SecularRoot(e_top, gap, tail.sum(-1), tail.square().sum(-1), outcome)
    for _ in range(_REFINEMENTS):
        # just above every other weight, should the root sit on one or all be 0
        above = (solver.root * (1.0 + torch.finfo(p.dtype).eps) + 1e-300)[..., None]
        ratio = tail / (above - tail)
        value = ratio.sum(-1)
        solver.refine(value, (value + ratio.square().sum(-1)) / above[..., 0])
    return (solver.root * first / tau).to(weights.dtype)


def frobenius_norm(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """||J||_F, [...] of the weights' dtype, in [0, 1/(2 tau)].

    Its square is sum p^2 - 2 sum p^3 + (sum p^2)^2, which cancels near one-hot rows; computed as
    sum_i p_i^2 ((1 - p_i)^2 + sum_{j != i} p_j^2), terms >= 0 only.
    """
    _check_tau(tau)
    p, rest, at = _parts(weights, sink)
    squares = p.square()
    others = (squares.sum(-1, keepdim=True) - squares).clamp(min=0.0)
    others = others.scatter(-1, at, squares.scatter(-1, at, 0.0).sum(-1, keepdim=True))
    return ((squares * (rest.square() + others)).sum(-1).sqrt() / tau).to(weights.dtype)


def largest_entry(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """max |J_ij| = max p_i (1 - p_i) / tau (it stands on the diagonal), [...], in [0, 1/(4 tau)]."""
    _check_tau(tau)
    p, rest, _ = _parts(weights, sink)
    return ((p * rest).amax(-1) / tau).to(weights.dtype)


def infinity_norm(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """Largest row sum of |J|: max p_i (1 - p_i + sum_{j != i} p_j) / tau, [...], in [0, 1/(2 tau)].

    Without a sink it is 2 max p_i (1 - p_i) / tau, so twice the largest entry; hence the bound.
    """
    _check_tau(tau)
    p, rest, _ = _parts(weights, sink)
    among_keys = rest if sink is None else rest - sink.double()[..., None]
    return ((p * (rest + among_keys.clamp(min=0.0))).amax(-1) / tau).to(weights.dtype)


def entry_bound(tau: float) -> float:
    """1 / (4 tau): sharp bound of the largest absolute entry. True; the only norm here in which 1/(4T) is right."""
    return 0.25 / _check_tau(tau)


def norm_bound(tau: float) -> float:
    """1 / (2 tau): sharp bound of the spectral, the Frobenius and the infinity norm. True (ours)."""
    return 0.5 / _check_tau(tau)


def finite_difference_bound(tau: float, eps: float) -> float:
    """min(1/(2 tau), sqrt(2)/eps): bound of ``finite_difference``. True (ours).

    sqrt 2 is the diameter of the simplex: it limits how far weights can move, so it bounds a step over its length.
    """
    return min(norm_bound(tau), math.sqrt(2.0) / _check_eps(eps))


def paper_expression(tau: float) -> float:
    """min(1/(4T), sqrt 2): the paper's expression for the spectral norm (not a bound). False as printed.

    Counterexample: two tied logits at T = 0.1 have a spectral norm of 5, the expression is sqrt 2; at T = 1, 0.5
    against 0.25.
    """
    return min(0.25 / _check_tau(tau), math.sqrt(2.0))


def eigenvalue_estimates(weights: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """low <= lambda_max(diag p - p p^T) <= high, [...] each, in O(n). True (definitions, section 4).

    low = max(max p_i (1 - p_i), second largest p); high = min(p_max, 2 max p_i (1 - p_i), sqrt(S2 (1 - S2))) with
    S2 = sum p^2.
    """
    p, rest, _ = _parts(weights, sink)
    variance = (p * rest).amax(-1)
    second = p.topk(2, dim=-1).values[..., 1] if p.shape[-1] > 1 else torch.zeros_like(variance)
    # 1 - S2 = sum p (1 - p), and the sink's weight: no difference
    unlike = (p * rest).sum(-1) + (0.0 if sink is None else sink.double())
    high = torch.minimum(p.amax(-1), 2.0 * variance).minimum((p.square().sum(-1) * unlike).sqrt())
    return torch.maximum(variance, second).to(weights.dtype), high.to(weights.dtype)


def finite_difference(
    logits: Tensor, direction: Tensor, tau: float, eps: float, visible: Tensor | None = None
) -> Tensor:
    """g(tau, eps) = |softmax((l + eps v)/tau) - softmax(l/tau)|_2 / eps (paper, Algorithm 5).

    Args:
        logits: [..., n], l, standard scaled logits at temperature 1; float32 or float64, which is what it computes in.
        direction: broadcastable to [..., n]; scaled here to unit length over each row's visible keys.
        tau: temperature, > 0.
        eps: length of the step in logits, > 0.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...], in [0, ``finite_difference_bound(tau, eps)``]; free of cancellation for small steps and sharp rows.

    Raises:
        AttnmonError: tau or eps is not positive and finite, or ``visible`` does not fit.
    """
    _check_tau(tau), _check_eps(eps)
    mask = visible_mask(visible, logits.shape)
    v = direction.to(logits.dtype).expand(logits.shape)
    z = logits / tau
    if mask is not None:
        v = torch.where(mask, v, 0.0)
        z = torch.where(mask, z, -math.inf)
    move = v * (eps / tau / torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    at = z.argmax(-1, keepdim=True)
    p = torch.softmax(z, -1)
    # relative to the move of the largest weight, which is then exactly 0: p (expm1(a) - m) / (1 + m)
    move = move - move.gather(-1, at)
    growth = torch.expm1(move.clamp(max=_OVERFLOWS))
    mean = (p * growth).sum(-1, keepdim=True)
    change = p * (growth - mean) / (1.0 + mean)
    # squares of a frozen row's changes underflow in float32
    length: Tensor = torch.linalg.vector_norm(change, dim=-1, dtype=torch.float64)
    far = move.amax(-1) > _OVERFLOWS
    if far.any():
        below = z[far].double()
        below = below - below.gather(-1, at[far])
        rest = torch.exp(below).scatter(-1, at[far], 0.0)
        moved = large_step(below, move[far].double(), at[far], rest, rest.sum(-1))
        length = length.masked_scatter(far, moved)
    return (length / eps).to(logits.dtype)


def large_step(below: Tensor, move: Tensor, at: Tensor, rest: Tensor, others: Tensor) -> Tensor:
    """|softmax(z + move) - softmax(z)| as a plain difference, for moves so large that it keeps its digits.

    But for the largest key, whose two weights may both be nearly 1: with Z = 1 + o before and Z' = e' + o' after, e'
    its own and o' all others', it changes by e' / Z' - 1 / Z = (e' o - o') / (Z Z').

    Args:
        below: [R, n], z - max z; far below 0 at hidden keys.
        move: [R, n], 0 at the largest key.
        at: int64 [R, 1], the largest key.
        rest: [R, n], exp(below), 0 at the largest key.
        others: [R], o, their sum.

    Returns:
        [R], in [0, sqrt 2].
    """
    moved = below + move
    top = moved.amax(-1, keepdim=True)
    # exp is many times slower at and below the least normal number
    least = math.log(torch.finfo(moved.dtype).tiny) + 1.0
    e = moved.sub_(top).clamp_(min=least).exp_().scatter_(-1, at, 0.0)
    own, others_moved = torch.exp(-top[..., 0]), e.sum(-1)
    total, total_moved = 1.0 + others, own + others_moved
    change = (own * others - others_moved) / (total * total_moved)
    e.mul_((1.0 / total_moved)[..., None]).addcmul_(rest, (1.0 / total)[..., None], value=-1.0)
    return torch.hypot(torch.linalg.vector_norm(e, dim=-1), change)


def row_directions(query_positions: Tensor, num_keys: int) -> Tensor:
    """The directions of ``jacobian_fd`` for rows of given positions (``attnmon.stats.directions``).

    Args:
        query_positions: int64 [R], counted from the sequence's first key.
        num_keys: keys, at positions 0 ... num_keys - 1.

    Returns:
        float32 [R, num_keys], standard normals; ``finite_difference`` scales them to unit length.
    """
    return direction_windows(direction_start(query_positions), num_keys)


def _parts(weights: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """p and 1 - p in float64, the latter of the largest weight as the sum of the others; and where that one is."""
    p = weights.double()
    at = p.argmax(-1, keepdim=True)
    others = p.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    if sink is not None:
        others = others + sink.double()[..., None]
    return p, (1.0 - p).scatter(-1, at, others), at


def _check_tau(tau: float) -> float:
    if not 0.0 < tau < math.inf:
        raise AttnmonError(f"tau must be positive and finite, not {tau}")
    return tau


def _check_eps(eps: float) -> float:
    if not 0.0 < eps < math.inf:
        raise AttnmonError(f"eps must be positive and finite, not {eps}")
    return eps
