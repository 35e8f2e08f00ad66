"""The softmax Jacobian in four norms, their sharp bounds, and the finite difference (paper, section 4).

"The paper" is arXiv 2508.17821. J = (diag p - p p^T) / tau is the derivative of the weights with respect to the
standard scaled logits l = tau z, where tau = 1 for the usual scale 1 / sqrt(d). With a learned sink the weights of the
keys sum to less than one. Everything is computed in float64, but for the finite difference.

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

from attnmon.checks import check_number
from attnmon.stats.directions import direction_start, direction_windows
from attnmon.stats.streaming import EIGENVALUE_CANDIDATES, SecularRoot, largest, leading
from attnmon.theory.rows import visible_mask

_REFINEMENTS = 4  # quadratic convergence: from the live solver's float32 accuracy to that of float64
_OVERFLOWS = 80.0  # of a move of the logits: expm1 of it and its products would leave float32


def spectral_norm(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """Solve for the exact spectral norm of J, lambda_max(diag p - p p^T) / tau.

    The solver is that of the live metric ``jacobian``, iterated to float64: O(n), without cancellation in nearly
    one-hot rows. The result carries no gradient, because the root is found in place.

    Args:
        weights: float [..., n], p over the keys; 0 at hidden keys.
        tau: temperature relative to the usual scale, > 0.
        sink: float [...], the weight of a learned sink; None: there is none.

    Returns:
        [...] of the weights' dtype, in [0, 1/(2 tau)].

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: ours (definitions, section 4); the paper states only a bound of it, which is false as printed.
    """
    check_number("tau", tau)
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
    """Compute the Frobenius norm of J.

    Its square is sum p^2 - 2 sum p^3 + (sum p^2)^2. That form cancels near one-hot rows, so the square is summed as
    sum_i p_i^2 ((1 - p_i)^2 + sum_{j != i} p_j^2), of terms >= 0 only.

    Args:
        weights: float [..., n], p over the keys; 0 at hidden keys.
        tau: temperature relative to the usual scale, > 0.
        sink: float [...], the weight of a learned sink; None: there is none.

    Returns:
        [...] of the weights' dtype, in [0, 1/(2 tau)].

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: ours (definitions, section 4).
    """
    check_number("tau", tau)
    p, rest, at = _parts(weights, sink)
    squares = p.square()
    others = (squares.sum(-1, keepdim=True) - squares).clamp(min=0.0)
    others = others.scatter(-1, at, squares.scatter(-1, at, 0.0).sum(-1, keepdim=True))
    return ((squares * (rest.square() + others)).sum(-1).sqrt() / tau).to(weights.dtype)


def largest_entry(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """Compute the largest absolute entry of J, max p_i (1 - p_i) / tau, which stands on the diagonal.

    Args:
        weights: float [..., n], p over the keys; 0 at hidden keys.
        tau: temperature relative to the usual scale, > 0.
        sink: float [...], the weight of a learned sink; None: there is none.

    Returns:
        [...] of the weights' dtype, in [0, 1/(4 tau)].

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: ours; the norm in which the paper's 1/(4T) is right.
    """
    check_number("tau", tau)
    p, rest, _ = _parts(weights, sink)
    return ((p * rest).amax(-1) / tau).to(weights.dtype)


def infinity_norm(weights: Tensor, tau: float = 1.0, sink: Tensor | None = None) -> Tensor:
    """Compute the infinity norm of J, its largest row sum: max p_i (1 - p_i + sum_{j != i} p_j) / tau.

    Without a sink it is 2 max p_i (1 - p_i) / tau, twice the largest entry, which proves the bound.

    Args:
        weights: float [..., n], p over the keys; 0 at hidden keys.
        tau: temperature relative to the usual scale, > 0.
        sink: float [...], the weight of a learned sink; None: there is none.

    Returns:
        [...] of the weights' dtype, in [0, 1/(2 tau)].

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: ours.
    """
    check_number("tau", tau)
    p, rest, _ = _parts(weights, sink)
    among_keys = rest if sink is None else rest - sink.double()[..., None]
    return ((p * (rest + among_keys.clamp(min=0.0))).amax(-1) / tau).to(weights.dtype)


def entry_bound(tau: float) -> float:
    """Return 1 / (4 tau), the sharp upper bound of ``largest_entry``. True.

    Args:
        tau: temperature relative to the usual scale, > 0.

    Returns:
        The bound, a number > 0.

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: the paper's sensitivity analysis (section 4), read in the only norm in which its 1/(4T) is right.
    """
    check_number("tau", tau)
    return 0.25 / tau


def norm_bound(tau: float) -> float:
    """Return 1 / (2 tau), the sharp upper bound of ``spectral_norm``, ``frobenius_norm`` and ``infinity_norm``. True.

    Args:
        tau: temperature relative to the usual scale, > 0.

    Returns:
        The bound, a number > 0.

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: ours (definitions, section 4).
    """
    check_number("tau", tau)
    return 0.5 / tau


def finite_difference_bound(tau: float, eps: float) -> float:
    """Return min(1/(2 tau), sqrt(2)/eps), an upper bound of ``finite_difference``. True.

    sqrt 2 is the diameter of the simplex: no step moves the weights farther, so sqrt(2)/eps bounds a move over the
    length of its step.

    Args:
        tau: temperature relative to the usual scale, > 0.
        eps: length of the step in logits, > 0.

    Returns:
        The bound, a number > 0.

    Raises:
        AttnmonError: ``tau`` or ``eps`` is no finite number > 0.

    Source: ours (definitions, section 4), in place of the paper's min(1/(4T), sqrt 2) (Algorithm 5).
    """
    check_number("eps", eps)
    return min(norm_bound(tau), math.sqrt(2.0) / eps)


def paper_expression(tau: float) -> float:
    """Return min(1/(4T), sqrt 2), the paper's expression for the spectral norm (not a bound). False as printed.

    Counterexample: two tied logits have a spectral norm of 5 at T = 0.1, where the expression is sqrt 2, and of 0.5 at
    T = 1, where it is 0.25.

    Args:
        tau: T, > 0.

    Returns:
        The expression, a number > 0.

    Raises:
        AttnmonError: ``tau`` is no finite number > 0.

    Source: the paper's sensitivity analysis (section 4) and Algorithm 5.
    """
    check_number("tau", tau)
    return min(0.25 / tau, math.sqrt(2.0))


def eigenvalue_estimates(weights: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Enclose lambda_max(diag p - p p^T) in O(n). True.

    The lower end is max(max p_i (1 - p_i), second largest p), the upper end
    min(p_max, 2 max p_i (1 - p_i), sqrt(S2 (1 - S2))) with S2 = sum p^2.

    Args:
        weights: float [..., n], p over the keys; 0 at hidden keys.
        sink: float [...], the weight of a learned sink; None: there is none.

    Returns:
        low and high, [...] of the weights' dtype: low <= lambda_max <= high. At temperature tau divide both by tau.

    Source: ours (definitions, section 4): Gershgorin, interlacing, Frobenius.
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
    """Compute g(tau, eps) = |softmax((l + eps v)/tau) - softmax(l/tau)|_2 / eps.

    Args:
        logits: float32 or float64 [..., n], l, standard scaled logits at temperature 1; their dtype is that of the
            arithmetic.
        direction: float, broadcastable to [..., n], v; scaled here to unit length over each row's visible keys.
        tau: temperature, > 0.
        eps: length of the step in logits, > 0.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the logits' dtype, in [0, ``finite_difference_bound(tau, eps)``]; free of cancellation for small steps
        and sharp rows.

    Raises:
        AttnmonError: ``tau`` or ``eps`` is no finite number > 0, or ``visible`` does not fit.

    Source: paper, Algorithm 5.
    """
    check_number("tau", tau)
    check_number("eps", eps)
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
        moved = large_move(below, move[far].double(), at[far], rest, rest.sum(-1))
        length = length.masked_scatter(far, moved)
    return (length / eps).to(logits.dtype)


def large_move(below: Tensor, move: Tensor, at: Tensor, rest: Tensor, others: Tensor) -> Tensor:
    """Compute |softmax(z + move) - softmax(z)| for moves so large that a plain difference keeps its digits.

    Only the largest key needs another form, since both of its weights may be nearly 1. With Z = 1 + o before the move
    and Z' = e' + o' after it, e' the key's own part and o' that of all others, its weight changes by
    e' / Z' - 1 / Z = (e' o - o') / (Z Z').

    Args:
        below: float32 or float64 [R, n], z - max z; far below 0 at hidden keys.
        move: [R, n] of the same dtype, 0 at the largest key.
        at: int64 [R, 1], the largest key.
        rest: [R, n] of the same dtype, exp(below), but 0 at the largest key.
        others: [R] of the same dtype, o, the sum of ``rest``.

    Returns:
        [R] of the same dtype, in [0, sqrt 2].

    Source: ours; the step itself is the paper's (Algorithm 5).
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
    """Give the directions that the live metric ``jacobian_fd`` takes for rows of given positions.

    Args:
        query_positions: int64 [R], counted from the sequence's first key.
        num_keys: keys, at positions 0 ... num_keys - 1.

    Returns:
        float32 [R, num_keys], standard normals; ``finite_difference`` scales them to unit length.

    Source: ours (``attnmon.stats.directions``); the paper draws one random direction a row (Algorithm 5).
    """
    return direction_windows(direction_start(query_positions), num_keys)


def _parts(weights: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows into p, 1 - p (for the largest weight the sum of the others) and the index of the largest weight.

    All numbers are float64.
    """
    p = weights.double()
    at = p.argmax(-1, keepdim=True)
    others = p.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    if sink is not None:
        others = others + sink.double()[..., None]
    return p, (1.0 - p).scatter(-1, at, others), at
