"""``merge``, between the passes: a row's partial results become one, and its selected token vectors are gathered.

The arithmetic is that of ``stats/streaming/softmax_rows.py``, which says what each number is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmon.stats.fused.fields import (
    FIRST_STEPS,
    INFINITY,
    LEAST_DEPTH,
    LEAST_GAP,
    LEAST_NORMAL,
    LOWEST,
    NOWHERE,
    R_BAD,
    R_BROKEN,
    R_COUNT,
    R_DIRECTION,
    R_DOT,
    R_FIRST,
    R_MAX,
    R_MU,
    R_OTHERS,
    R_REACH,
    R_S_SQUARE,
    R_SECOND,
    R_STD,
    R_STEP,
    R_TAIL_SQUARE,
    R_TOP,
    R_UNCAPPED,
    S_BAD,
    S_COUNT,
    S_FARTHEST,
    S_FIELDS,
    S_FIRST,
    S_MAX,
    S_MEAN,
    S_NORM,
    S_SQUARES,
    S_TAIL,
    S_TAIL_DOT,
    S_TAIL_SQUARE,
    S_UNCAPPED,
    T_DIRECTION,
    TINY,
)
from attnmon.stats.fused.math import expm1, secular_step, sink_lead


@triton.jit(do_not_specialize=["first_sequence", "sequence_step", "num_groups"])
def merge(
    partial_select, part_z, part_i, rows, table, sinks, x, record, list_z, list_i, near_square, near_excess, s_vectors,
    step, first_sequence, sequence_step, num_rows, num_groups, num_total, row_stride, field_stride,
    x_stride_b, x_stride_h, x_stride_l, x_stride_d,
    GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    SINK: tl.constexpr, FD: tl.constexpr, TABLE: tl.constexpr, JACOBIAN: tl.constexpr, TOKENS: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ``select``: a row's record, its K largest in order, a first eigenvalue, and s.

    Equal logits come in the order of their keys. Slots without a key hold logit -inf and key NOWHERE. The package's
    docstring says what each argument is.
    """
    at = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    seen = at < num_total
    slot = tl.arange(0, KP)[None, :]
    sg = at // num_rows
    s = sg // num_groups
    g = sg % num_groups
    row = at % num_rows
    head = g * GROUP + row % GROUP

    split = tl.arange(0, SPLITS)
    place = partial_select + split[None, :] * (S_FIELDS * num_total) + at[:, None]
    mask = seen[:, None] & (split >= 0)[None, :]
    part_max = tl.load(place + S_MAX * num_total, mask=mask, other=LOWEST)
    largest = tl.max(part_max, 1)
    shift = part_max - largest[:, None]  # <= 0
    decay = tl.exp(shift)
    part_tail = tl.load(place + S_TAIL * num_total, mask=mask, other=0.0)
    part_dot = tl.load(place + S_TAIL_DOT * num_total, mask=mask, other=0.0)
    tail_dot = tl.sum(tl.where(decay > 0.0, decay * (part_dot + shift * part_tail), 0.0), 1)
    tail = tl.sum(decay * part_tail, 1)
    tail_square = tl.sum(decay * decay * tl.load(place + S_TAIL_SQUARE * num_total, mask=mask, other=0.0), 1)
    part_count = tl.load(place + S_COUNT * num_total, mask=mask, other=0.0)
    count = tl.sum(part_count, 1)
    means = tl.load(place + S_MEAN * num_total, mask=mask, other=0.0)
    means = tl.where(part_count > 0.0, means + shift, 0.0)
    mean = tl.sum(part_count * means, 1) / tl.maximum(count, 1.0)
    gap = tl.where(part_count > 0.0, means - mean[:, None], 0.0)
    squares = tl.sum(tl.load(place + S_SQUARES * num_total, mask=mask, other=0.0) + part_count * gap * gap, 1)
    first_z = tl.max(tl.load(place + S_FIRST * num_total, mask=mask, other=float("-inf")), 1)
    uncapped = tl.max(tl.load(place + S_UNCAPPED * num_total, mask=mask, other=float("-inf")), 1)
    bad = tl.max(tl.load(place + S_BAD * num_total, mask=mask, other=0.0), 1)

    # the K largest of the splits' lists, in order; the others join the tail
    candidate = tl.arange(0, SPLITS * KP)
    spot = at[:, None] * (SPLITS * KP) + candidate[None, :]
    listed = seen[:, None] & (candidate >= 0)[None, :]
    z = tl.load(part_z + spot, mask=listed, other=float("-inf"))
    index = tl.load(part_i + spot, mask=listed, other=NOWHERE)
    top_z = tl.full([BR, KP], float("-inf"), tl.float32)
    top_i = tl.zeros([BR, KP], tl.int32) + NOWHERE
    for rank in range(K):
        best = tl.max(z, 1)
        best_i = tl.min(tl.where(z == best[:, None], index, NOWHERE), 1)
        best_i = tl.where(best > float("-inf"), best_i, NOWHERE)
        top_z = tl.where(slot == rank, best[:, None], top_z)
        top_i = tl.where(slot == rank, best_i[:, None], top_i)
        z = tl.where((z == best[:, None]) & (index == best_i[:, None]), float("-inf"), z)
    depth = z - largest[:, None]
    e_left = tl.exp(depth)
    tail_dot += tl.sum(tl.where(e_left > 0.0, e_left * depth, 0.0), 1)
    tail += tl.sum(e_left, 1)
    tail_square += tl.sum(e_left * e_left, 1)

    top_depth = top_z - largest[:, None]
    e = tl.exp(top_depth)
    others = tl.sum(tl.where(slot > 0, e, 0.0), 1) + tail
    own = record + at
    tl.store(own + R_MAX * num_total, largest, mask=seen)
    tl.store(own + R_COUNT * num_total, count, mask=seen)
    tl.store(own + R_BAD * num_total, bad, mask=seen)
    tl.store(own + R_STD * num_total, tl.sqrt(squares / tl.maximum(count, 1.0)), mask=seen)
    tl.store(own + R_OTHERS * num_total, others, mask=seen)
    tl.store(own + R_DOT * num_total, tail_dot + tl.sum(tl.where(e > 0.0, e * top_depth, 0.0), 1), mask=seen)
    tl.store(own + R_FIRST * num_total, tl.exp(first_z - largest), mask=seen)
    tl.store(own + R_TOP * num_total, tl.sum(tl.where(slot < N, e, 0.0), 1), mask=seen)
    tl.store(own + R_UNCAPPED * num_total, uncapped, mask=seen)
    tl.store(own + R_TAIL_SQUARE * num_total, tail_square, mask=seen)
    keep = at[:, None] * KP + slot
    tl.store(list_z + keep, top_z, mask=seen[:, None])
    tl.store(list_i + keep, top_i, mask=seen[:, None])

    if JACOBIAN:
        second = tl.sum(tl.where(slot == 1, e, 0.0), 1)
        second_depth = tl.max(tl.where(slot == 1, top_depth, float("-inf")), 1)
        apart = -expm1(tl.maximum(second_depth, LEAST_DEPTH))
        weights = tl.where(slot > 0, e, 0.0)
        pole = tl.minimum(tail_square / tl.maximum(tail, TINY), second)
        sink = tail
        if SINK:
            sink = tl.exp(sink_lead(sinks, head, largest, seen))
        mu = tl.maximum(apart, LEAST_GAP) * 0.5
        for _ in range(FIRST_STEPS):
            mu = secular_step(mu, second, apart, weights, pole, tail, sink, SINK)
        tl.store(own + R_MU * num_total, tl.where(apart > 0.0, mu, 0.0), mask=seen)
        tl.store(own + R_SECOND * num_total, second, mask=seen)
    if FD > 0:
        norm = tl.sum(tl.load(place + S_NORM * num_total, mask=mask, other=0.0), 1)
        stretch = step / tl.sqrt(tl.maximum(norm, LEAST_NORMAL))
        largest_i = tl.min(tl.where(slot == 0, top_i, NOWHERE), 1)
        offset = tl.load(rows + s * row_stride + row // GROUP + T_DIRECTION * field_stride, mask=seen, other=0)
        some = seen & (largest_i < NOWHERE)
        origin = tl.load(table + ((offset + largest_i) & (TABLE - 1)), mask=some, other=0.0)
        tl.store(own + R_STEP * num_total, stretch, mask=seen)
        tl.store(own + R_DIRECTION * num_total, origin, mask=seen)
        if FD == 2:
            farthest = tl.max(tl.load(place + S_FARTHEST * num_total, mask=mask, other=float("-inf")), 1)
            tl.store(own + R_REACH * num_total, (farthest - origin) * stretch, mask=seen)
    if TOKENS > 0:
        exists = seen[:, None] & (top_z > float("-inf"))
        b = first_sequence + s * sequence_step
        key = tl.where(exists, top_i, 0).to(tl.int64)
        x_keys = x + (b * x_stride_b + g * x_stride_h)[:, None] + key * x_stride_l
        square = tl.zeros([BR, KP], tl.float32)
        for first in range(0, E, BE):
            d = first + tl.arange(0, BE)
            vector = tl.load(
                x_keys[:, :, None] + d[None, None, :] * x_stride_d,
                mask=exists[:, :, None] & (d < E)[None, None, :],
                other=0.0,
            ).to(tl.float32)
            square += tl.sum(vector * vector, 2)
        factor = e
        if TOKENS == 1:
            factor = e / tl.where(square > 0.0, tl.sqrt(square), 1.0)
        s_square = tl.zeros([BR], tl.float32)
        to_s = tl.zeros([BR, KP], tl.float32)
        excess = tl.zeros([BR, KP], tl.float32)
        chosen = (slot < N)[:, :, None]
        for first in range(0, E, BE):
            d = first + tl.arange(0, BE)
            vector = tl.load(
                x_keys[:, :, None] + d[None, None, :] * x_stride_d,
                mask=exists[:, :, None] & (d < E)[None, None, :],
                other=0.0,
            ).to(tl.float32)
            weighted = vector * factor[:, :, None]
            center = tl.sum(tl.where(chosen, weighted, 0.0), 1)
            tl.store(s_vectors + at[:, None] * E + d[None, :], center, mask=seen[:, None] & (d < E)[None, :])
            away = weighted - center[:, None, :]
            s_square += tl.sum(center * center, 1)
            to_s += tl.sum(away * away, 2)
            excess += tl.sum(weighted * (away - center[:, None, :]), 2)
        tl.store(own + R_S_SQUARE * num_total, s_square, mask=seen)
        tl.store(near_square + keep, to_s, mask=seen[:, None])
        tl.store(near_excess + keep, excess, mask=seen[:, None])
        broken = tl.max((exists & ((square < INFINITY) == 0)).to(tl.int32), 1)
        tl.store(own + R_BROKEN * num_total, broken.to(tl.float32), mask=seen)
