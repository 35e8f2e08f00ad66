"""|softmax(z + a) - softmax(z)| of rows without cancellation.

Source: paper, Algorithm 5, with the corrections of the project's definitions, section 4.

Weights are unnormalized, e = exp(z - max z), so the largest is exactly 1 and the others' sum is what is left of Z.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmon.stats.streaming.scratch import scratch
from attnmon.stats.streaming.top_keys import leading

EXPM1_LIMIT = 1.0  # of eps / tau, which bounds |a|; far beyond, 1 + expm1(a) and its squares lose digits


def small_step(
    x: Tensor, tail: Tensor, index: Tensor, e_top: Tensor, tail_sum: Tensor, tail_square: Tensor, sink: Tensor | None
) -> Tensor:
    """The length of the change of softmax, [S, H, R], given x = expm1(a).

    With y_j = x_j - x_t, t the largest key, and E = sum p y, key j's weight changes by
    p_j (y_j - E) / (1 + x_t + E). The largest key has y = 0 exactly, so nothing of order one is subtracted.

    Args:
        x: broadcastable to [S, H, R, Lk].
        tail: [S, H, R, Lk], e of keys beyond the K largest, 0 at the K largest.
        index: int64 [S, H, R, K], the K largest keys.
        e_top: [K, S, H, R], e of the K largest keys, descending, e_top[0] == 1; 0 at masked keys.
        tail_sum, tail_square: [S, H, R], sums of ``tail`` and of its squares.
        sink: [S, H, R], e of a learned sink, whose logit stays where it is, or None.
    """
    x_top = leading(x.expand_as(tail).gather(-1, index))
    tail_x = torch.mul(tail, x, out=scratch("work", tail.shape, tail))
    x_largest = x_top[0].clone()
    y_top = x_top.sub_(x_largest)
    total = e_top.sum(0) + tail_sum
    shift = (e_top * y_top).sum(0) + tail_x.sum(-1) - x_largest * tail_sum
    if sink is not None:
        total = total + sink
        shift = shift - sink * x_largest
    shift = shift / total
    # the rest: sum e^2 (y - E)^2, expanded around y - E = x - (x_t + E)
    origin = x_largest + shift
    square_xx = torch.linalg.vector_norm(tail_x, dim=-1).square()
    square_x = tail_x.mul_(tail).sum(-1)
    rest = (square_xx - 2.0 * origin * square_x + origin * origin * tail_square).clamp_(min=0.0)
    moved = y_top.sub_(shift).mul_(e_top).square_().sum(0) + rest
    length: Tensor = moved.sqrt_() / (total * (1.0 + origin))
    return length


def large_step(d: Tensor, a: Tensor, largest_key: Tensor, others: Tensor, lead: Tensor | None) -> Tensor:
    """The length of the change of softmax, [S, H, R], through log-weights: for steps whose exp(a) leaves float32.

    Args:
        d: [S, H, R, Lk], z - max z.
        a: the step, broadcastable to [S, H, R, Lk].
        largest_key: int64 [S, H, R, 1].
        others: [S, H, R], Z - 1.
        lead: [S, H, R], a learned sink's logit minus max z, or None.
    """
    origin = a.expand_as(d).gather(-1, largest_key)
    a = a - origin
    moved = d + a
    top = moved.amax(-1)
    if lead is not None:
        sink_moved = lead - origin[..., 0]
        top = torch.maximum(top, sink_moved)
    e_moved = torch.exp(moved - top[..., None])
    others_moved = e_moved.scatter(-1, largest_key, 0.0).sum(-1)
    if lead is not None:
        others_moved = others_moved + torch.exp(sink_moved - top)
    total = torch.exp(-top) + others_moved
    log_change = torch.where(top > 0, top + torch.log(total), torch.log1p(others_moved)) - torch.log1p(others)
    change = a - log_change[..., None]
    before = torch.exp(d) / (1.0 + others)[..., None]
    difference = torch.where(change < 20.0, before * torch.expm1(change.clamp(max=20.0)), e_moved / total[..., None])
    length: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return length
