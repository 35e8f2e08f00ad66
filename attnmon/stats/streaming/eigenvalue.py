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

from attnmon.stats.streaming.scratch import scratch

EIGENVALUE_CANDIDATES = 5
"""Largest weights that enter the eigenvalue exactly; enough for it to settle."""

_FIRST_ITERATIONS = 2  # from the middle of the interval, with a model of the tail
_MORE_ITERATIONS = 2  # from the first root, with the tail's true sums: to float32 accuracy on every row tried
_LEAST_GAP = 1e-12
_TINY = 1e-30
_MAX_SINK = 1e17  # of e_s; Lambda is 1 in float32 long before, and squares must not overflow


def scaled_eigenvalue(
    e_top: Tensor, d_top: Tensor, tail: Tensor, tail_sum: Tensor, tail_square: Tensor, sink: Tensor | None
) -> Tensor:
    """Z lambda_max of each row, [...].

    The equation is solved with the few largest weights and a model of the tail, then again with the tail's true sums.

    Args:
        e_top, d_top: [K, ...] the largest e, descending, and their logarithms; e_top[0] == 1.
        tail: [..., Lk] e of the other keys, 0 at the K largest.
        tail_sum, tail_square: [...] sums of ``tail`` and of its squares.
        sink: [...] e_s, or None.

    Source: the project's definitions, section 4.
    """
    few = min(e_top.shape[0], EIGENVALUE_CANDIDATES)
    top, rest = e_top[:few], e_top[few:]
    if few == 1:
        second, gap = torch.zeros_like(tail_sum), torch.ones_like(tail_sum)
        top = torch.stack([top[0], second])
    else:
        gap = -torch.expm1(d_top[1])
    solver = SecularRoot(top, gap, tail_sum + rest.sum(0), tail_square + rest.square().sum(0), sink)
    # just above every other weight, should the root sit on one or all be 0
    above = solver.root * (1.0 + torch.finfo(tail.dtype).eps) + _TINY
    ratio = torch.sub(above[..., None], tail, out=scratch("work", tail.shape, tail))
    torch.div(tail, ratio, out=ratio)
    ratio_rest = rest / (above - rest)
    total = ratio.sum(-1) + ratio_rest.sum(0)
    # sum e / (root - e)^2 = (sum r + sum r^2) / root with r = e / (root - e)
    slope = (total + torch.linalg.vector_norm(ratio, dim=-1).square() + ratio_rest.square_().sum(0)) / above
    return solver.refine(total, slope)


class SecularRoot:
    """Solves the secular equation for many rows: once with a model of the tail, again with the tail's true sums.

    Attributes:
        root: [...], the present estimate of Lambda.
    """

    def __init__(self, top: Tensor, gap: Tensor, tail_sum: Tensor, tail_square: Tensor, sink: Tensor | None) -> None:
        """Solve with a model of the tail.

        Args, all float32:
            top: [K, ...] the largest e, descending, top[0] == 1; zeros where a row has fewer keys.
            gap: [...], 1 - top[1] without cancellation.
            tail_sum, tail_square: [...] sums of e and e^2 over the keys beyond K.
            sink: [...] e_s, or None.
        """
        self._second = top[1]
        self._gap = gap
        # one pole that carries the tail's first two moments; exact when its weights are equal
        # (then rounding must not lift it past the second weight)
        pole = (tail_square / tail_sum.clamp(min=_TINY)).minimum(self._second)
        weights, poles = [top[1:], tail_sum[None]], [top[1:], pole[None]]
        if sink is not None:
            weights.append(sink.clamp(max=_MAX_SINK)[None])
            poles.append(torch.zeros_like(pole)[None])
        self._tail = top.shape[0] - 1
        self._weights = torch.cat(weights)
        self._below = self._second - torch.cat(poles)  # >= 0, exact for close numbers
        self._mu = self._gap.clamp(min=_LEAST_GAP) * 0.5
        self.root = self._solve(_FIRST_ITERATIONS)

    def refine(self, tail_value: Tensor, tail_slope: Tensor) -> Tensor:
        """Solve again with the tail's own value and slope at the present root.

        Args:
            tail_value: [...], sum over the tail of e / (root - e).
            tail_slope: [...], sum over the tail of e / (root - e)^2.

        Returns:
            [...], the new root.
        """
        # a / (Lambda - b) with this value and slope at the root
        distance = tail_value / tail_slope.clamp(min=_TINY)
        self._weights[self._tail] = tail_value * distance
        self._below[self._tail] = (self._second - self.root + distance).clamp(min=0.0)
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
            # value = r + s / mu of each term w / (mu + below): s = w (mu / distance)^2, r = w below / distance^2
            mu = mu.clamp(min=_TINY)
            distance = self._below + mu
            value = self._weights / distance
            at_second = (value * (mu / distance)).sum(0)
            s = mu * at_second
            r = (value.sum(0) - at_second).clamp(min=_TINY)
            # 1 / (gap - mu) = r + s / mu   =>   r mu^2 - (r gap - s - 1) mu - s gap = 0
            b = r * gap - s - 1.0
            product = s * gap
            h = torch.addcmul(b * b, r, product, value=4.0).sqrt() + b.abs()
            # the positive root, in the form that does not cancel
            mu = torch.where(b >= 0, h / (r + r), (product + product) / h).minimum(gap)
        self._mu = mu
        return torch.where(self._gap > 0, self._second + mu, self._second)
