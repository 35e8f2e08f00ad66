"""The largest eigenvalue of diag p - p p^T from a row's largest weights and sums over the rest.

With weights e = exp(z - max z), so e_1 = 1, and Z their sum (a sink's e_s included), lambda_max = Lambda / Z
where Lambda in [e_2, 1) is the root of

    1 / (1 - Lambda) = sum over i >= 2 of e_i / (Lambda - e_i) + e_s / Lambda

(the secular equation of definitions, section 4, multiplied out: every term is positive, so nothing cancels
near one-hot rows, where lambda is of the order of 1 - p_1).
"""

from __future__ import annotations

import torch
from torch import Tensor

EIGENVALUE_CANDIDATES = 5
"""Largest weights that enter the eigenvalue exactly; enough for it to settle."""

_FIRST_ITERATIONS = 3  # from the middle of the interval: to float32 accuracy on every row tried
_MORE_ITERATIONS = 2  # from there
_LEAST_GAP = 1e-12
_TINY = 1e-37
_MAX_SINK = 1e17  # of e_s; Lambda is 1 in float32 long before, and squares must not overflow


def scaled_eigenvalue(
    e_top: Tensor, d_top: Tensor, tail: Tensor, tail_sum: Tensor, tail_square: Tensor, sink: Tensor | None
) -> Tensor:
    """Z lambda_max of each row: solved with the few largest weights, then once more with all others' true sums.

    Args:
        e_top, d_top: [..., K] the largest e, descending, and their logarithms; e_top[..., 0] == 1.
        tail: [..., Lk] e of the others, 0 at those K; its sum and sum of squares, [...].
        sink: [...] e_s, or None.
    """
    few = min(e_top.shape[-1], EIGENVALUE_CANDIDATES)
    top, gaps, rest = e_top[..., :few], -torch.expm1(d_top[..., :few]), e_top[..., few:]
    if few == 1:
        top, gaps = torch.nn.functional.pad(top, (0, 1)), torch.nn.functional.pad(gaps, (0, 1), value=1.0)
    solver = SecularRoot(top, gaps, tail_sum + rest.sum(-1), tail_square + _square_sum(rest), sink)
    # just above every other weight, should the root sit on one or all be 0
    above = (solver.root * (1.0 + torch.finfo(tail.dtype).eps) + 1e-30)[..., None]
    ratio = tail / (above - tail)
    ratio_rest = rest / (above - rest)
    total = ratio.sum(-1) + ratio_rest.sum(-1)
    # sum e / (root - e)^2 = (sum r + sum r^2) / root with r = e / (root - e)
    slope = (total + _square_sum(ratio) + _square_sum(ratio_rest)) / above[..., 0]
    return solver.refine(total, slope)


class SecularRoot:
    """Solves the equation for many rows: once with a model of the tail, again with the tail's true sums."""

    def __init__(self, top: Tensor, gap: Tensor, tail_sum: Tensor, tail_square: Tensor, sink: Tensor | None) -> None:
        """Args, all float32:
        top: [..., K] the largest e, descending, top[..., 0] == 1; zeros where a row has fewer keys.
        gap: [..., K], 1 - top without cancellation.
        tail_sum, tail_square: [...] sums of e and e^2 over the keys beyond K.
        sink: [...] e_s, or None.
        """
        self._second = top[..., 1]
        self._others = top[..., 1:]
        self._below_second = self._second[..., None] - self._others  # >= 0, exact for close numbers
        self._gap = gap[..., 1]
        self._sink = None if sink is None else sink.clamp(max=_MAX_SINK)
        # one pole that carries the first two moments; exact when the tail's weights are equal
        # (then rounding must not lift it past the second weight)
        self._tail_weight = (tail_square / tail_sum.clamp(min=_TINY)).minimum(self._second)
        self._tail_residue = tail_sum
        self._mu = gap[..., 1].clamp(min=_LEAST_GAP) * 0.5
        self.root = self._solve(_FIRST_ITERATIONS)

    def refine(self, tail_value: Tensor, tail_slope: Tensor) -> Tensor:
        """Solve again with the tail's own value and slope at the present root.

        Args:
            tail_value: sum over the tail of e / (root - e).
            tail_slope: sum over the tail of e / (root - e)^2.
        """
        # a / (Lambda - b) with this value and slope at the root
        distance = tail_value / tail_slope.clamp(min=_TINY)
        self._tail_residue = tail_value * distance
        self._tail_weight = (self.root - distance).minimum(self._second)
        self.root = self._solve(_MORE_ITERATIONS)
        return self.root

    def _solve(self, iterations: int) -> Tensor:
        """Root as second + mu; fixed-point steps that keep the poles at 1 and at e_2 exact.

        The others are replaced by r + s / mu with their value and slope at the present point, which turns each
        step into a quadratic equation; convergence is quadratic and from one side (Bunch, Nielsen, Sorensen).
        """
        gap = self._gap.clamp(min=_LEAST_GAP)  # 1 - e_2; where it is 0 the answer below is e_2 itself
        mu = self._mu
        for _ in range(iterations):
            # value = r + s / mu of each term e / (mu + below): s = e (mu / distance)^2, r = e below / distance^2
            distance = (self._below_second + mu[..., None]).clamp(min=_TINY)
            share = mu[..., None] / distance
            s = (self._others * share * share).sum(-1)
            r = (self._others / distance * (1.0 - share)).sum(-1)
            tail_below = self._second - self._tail_weight
            tail_distance = (tail_below + mu).clamp(min=_TINY)
            share = mu / tail_distance
            s = s + self._tail_residue * share * share
            r = r + self._tail_residue / tail_distance * (1.0 - share)
            if self._sink is not None:
                distance = (self._second + mu).clamp(min=_TINY)
                share = mu / distance
                s = s + self._sink * share * share
                r = r + self._sink / distance * (1.0 - share)
            r = r.clamp(min=0.0)
            # 1 / (gap - mu) = r + s / mu   =>   r mu^2 - (r gap - s - 1) mu - s gap = 0
            b = r * gap - s - 1.0
            root = torch.sqrt(b * b + 4.0 * r * s * gap)
            # the positive root, in the form that does not cancel
            positive = b >= 0
            mu = torch.where(
                positive, (b + root) / (2.0 * r).clamp(min=_TINY), 2.0 * s * gap / (root - b).clamp(min=_TINY)
            )
            mu = mu.clamp(min=0.0).minimum(gap)
        self._mu = mu
        return torch.where(self._gap > 0, self._second + mu, self._second)


def _square_sum(tensor: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensor, dim=-1)
    return length.square()
