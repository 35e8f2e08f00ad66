"""Functions of numbers that the kernels share, accurate where the obvious expression cancels.

The functions use exp and log alone, so that they run on every target and in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmon.stats.fused.fields import (
    JUST_ABOVE,
    LEAST_GAP,
    LEAST_SINK_LEAD,
    LIFT,
    MAX_SINK,
    MAX_SINK_LEAD,
    TINY,
)


@triton.jit
def expm1(x):
    """exp(x) - 1 with full relative accuracy."""
    t = tl.minimum(tl.maximum(x, -0.5), 0.5)
    series = 1.0 + t / 9.0
    series = 1.0 + t / 8.0 * series
    series = 1.0 + t / 7.0 * series
    series = 1.0 + t / 6.0 * series
    series = 1.0 + t / 5.0 * series
    series = 1.0 + t / 4.0 * series
    series = 1.0 + t / 3.0 * series
    series = 1.0 + t / 2.0 * series
    return tl.where(tl.abs(x) < 0.5, t * series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) with full relative accuracy, x >= 0."""
    t = tl.minimum(x, 0.5)
    w = t / (2.0 + t)  # log1p(t) = 2 atanh(w), w <= 0.2
    square = w * w
    series = 1.0 / 11.0 + square / 13.0
    series = 1.0 / 9.0 + square * series
    series = 1.0 / 7.0 + square * series
    series = 1.0 / 5.0 + square * series
    series = 1.0 / 3.0 + square * series
    return tl.where(x < 0.5, 2.0 * w * (1.0 + square * series), tl.log(1.0 + x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent with full relative accuracy."""
    grown = expm1(2.0 * tl.minimum(tl.abs(x), 20.0))
    size = grown / (grown + 2.0)
    return tl.where(x < 0.0, -size, tl.where(x == x, size, x))  # NaN stays, to be counted


@triton.jit
def secular_step(mu, second, gap, others, tail_weight, tail_residue, sink, HAS_SINK: tl.constexpr):
    """The next mu of a fixed-point iteration towards the root Lambda = second + mu of the secular equation.

    The equation and the step are those of ``stats/streaming/eigenvalue.py``.

    Args:
        mu: [R], the present estimate.
        second: [R], e_2.
        gap: [R], 1 - e_2.
        others: [R, K], e of the K largest, 0 in place of the largest.
        tail_weight: [R], pole that stands for the keys beyond the K largest.
        tail_residue: [R], weight of that pole.
        sink: [R], e_s; not read without HAS_SINK.
    """
    gap = tl.maximum(gap, LEAST_GAP)
    distance = tl.maximum(second[:, None] - others + mu[:, None], TINY)
    share = mu[:, None] / distance
    s = tl.sum(others * share * share, 1)
    r = tl.sum(others / distance * (1.0 - share), 1)
    distance_tail = tl.maximum(second - tail_weight + mu, TINY)
    share_tail = mu / distance_tail
    s += tail_residue * share_tail * share_tail
    r += tail_residue / distance_tail * (1.0 - share_tail)
    if HAS_SINK:
        held = tl.minimum(sink, MAX_SINK)
        distance_sink = tl.maximum(second + mu, TINY)
        share_sink = mu / distance_sink
        s += held * share_sink * share_sink
        r += held / distance_sink * (1.0 - share_sink)
    r = tl.maximum(r, 0.0)
    # 1 / (gap - mu) = r + s / mu: the positive root, in the form that does not cancel
    b = r * gap - s - 1.0
    root = tl.sqrt(b * b + 4.0 * r * s * gap)
    by_r = (b + root) / tl.maximum(2.0 * r, TINY)
    by_s = 2.0 * s * gap / tl.maximum(root - b, TINY)
    return tl.minimum(tl.maximum(tl.where(b >= 0.0, by_r, by_s), 0.0), gap)


@triton.jit
def just_above(root):
    """The next number above an eigenvalue's estimate [R], should it sit on a weight or should all weights be 0."""
    return root * JUST_ABOVE + LIFT


@triton.jit
def sink_lead(sinks, head, largest, seen):
    """A sink's logit minus the row's largest, [R], held where exp neither overflows nor is missed.

    Args:
        sinks: pointer to [H] logits.
        head: [R], the row's query head.
        largest: [R], the row's largest logit.
        seen: bool [R], which rows exist.
    """
    logit = tl.load(sinks + head, mask=seen, other=0.0).to(tl.float32)
    return tl.minimum(tl.maximum(logit - largest, LEAST_SINK_LEAD), MAX_SINK_LEAD)
