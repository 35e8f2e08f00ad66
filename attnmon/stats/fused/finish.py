"""``finish``, after the passes: rows become a head's sums and maxima.

Of the keys, the kernel reads the one token vector of each row that comes nearest to s. The arithmetic is that of
``stats/streaming/softmax_rows.py`` and ``separation.py``, which say what each number is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmon.stats.fused.fields import (
    A_MASKED,
    A_NONFINITE,
    A_VALID,
    CANCELS,
    EXPONENT_LIMIT,
    INFINITY,
    LEAST_DEPTH,
    LEAST_LOG,
    LEAST_SHARE,
    LOWEST,
    MORE_STEPS,
    P_FAR,
    P_FIELDS,
    P_LEAST,
    P_LEAST_E,
    P_MOVE,
    P_MOVE_E,
    P_MOVE_SQUARE,
    P_MOVED,
    P_MOVED_E,
    P_MOVED_MAX,
    P_MOVED_SQUARE,
    P_RATIO,
    P_RATIO_SQUARE,
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
    T_DIRECTION,
    TINY,
)
from attnmon.stats.fused.math import expm1, just_above, log1p, secular_step, sink_lead


@triton.jit
def _eigenvalue(
    own, place, mask, seen, e, slot, second_depth, sink, num_total, SINK: tl.constexpr
):  # fmt: skip
    """Lambda of each row, [BR]: its first estimate refined with the tail's sums that ``spread`` took there."""
    second = tl.load(own + R_SECOND * num_total, mask=seen, other=0.0)
    mu = tl.load(own + R_MU * num_total, mask=seen, other=0.0)
    value = tl.sum(tl.load(place + P_RATIO * num_total, mask=mask, other=0.0), 1)
    value_square = tl.sum(tl.load(place + P_RATIO_SQUARE * num_total, mask=mask, other=0.0), 1)
    root = second + mu
    slope = (value + value_square) / just_above(root)
    # the tail as residue / (Lambda - pole), with this value and slope at the estimate
    distance = value / tl.maximum(slope, TINY)
    pole = tl.minimum(root - distance, second)
    apart = -expm1(tl.maximum(second_depth, LEAST_DEPTH))
    weights = tl.where(slot > 0, e, 0.0)
    for _ in range(MORE_STEPS):
        mu = secular_step(mu, second, apart, weights, pole, value * distance, sink, SINK)
    return tl.where(apart > 0.0, second + mu, second)


@triton.jit
def _moved(
    own, place, mask, seen, e, depth, slot, entries, total, others, tail_square, sink, lead, num_total,
    FD: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """|softmax(z + a) - softmax(z)| of each row, [BR], a the step along the row's direction.

    With y_j = expm1(a_j - a_t), t the largest key, and E = sum p y, key j's weight changes by
    p_j (y_j - E) / (1 + E). ``entries`` [BR, KP] are the direction's at the K largest keys.
    """
    stretch = tl.load(own + R_STEP * num_total, mask=seen, other=0.0)
    origin = tl.load(own + R_DIRECTION * num_total, mask=seen, other=0.0)
    ahead = (entries - origin[:, None]) * stretch[:, None]
    ahead = tl.where(e > 0.0, ahead, 0.0)
    y = expm1(tl.minimum(ahead, EXPONENT_LIMIT))
    mean = tl.sum(e * y, 1) + tl.sum(tl.load(place + P_MOVE * num_total, mask=mask, other=0.0), 1)
    if SINK:
        mean += sink * expm1(tl.minimum(-origin * stretch, EXPONENT_LIMIT))
    mean = mean / total
    move_e = tl.sum(tl.load(place + P_MOVE_E * num_total, mask=mask, other=0.0), 1)
    move_square = tl.sum(tl.load(place + P_MOVE_SQUARE * num_total, mask=mask, other=0.0), 1)
    rest = move_square - 2.0 * mean * move_e + mean * mean * tail_square
    near = e * (y - mean[:, None])
    length = tl.sqrt(tl.sum(near * near, 1) + tl.maximum(rest, 0.0)) / (total * (1.0 + mean))
    if FD == 2:
        # moves that exp cannot take, or that leave the largest key far behind all others: both softmaxes apart
        lifted = tl.where(e > 0.0, depth + ahead, float("-inf"))
        part_max = tl.load(place + P_MOVED_MAX * num_total, mask=mask, other=LOWEST)
        highest = tl.maximum(tl.max(lifted, 1), tl.max(part_max, 1))
        sink_lifted = -origin * stretch
        if SINK:
            sink_lifted += lead
            highest = tl.maximum(highest, sink_lifted)
        w = tl.exp(lifted - highest[:, None])
        decay = tl.exp(part_max - highest[:, None])
        w_tail = tl.sum(decay * tl.load(place + P_MOVED * num_total, mask=mask, other=0.0), 1)
        w_square = tl.sum(decay * decay * tl.load(place + P_MOVED_SQUARE * num_total, mask=mask, other=0.0), 1)
        w_e = tl.sum(decay * tl.load(place + P_MOVED_E * num_total, mask=mask, other=0.0), 1)
        w_others = tl.sum(tl.where(slot > 0, w, 0.0), 1) + w_tail
        if SINK:
            w_others += tl.exp(sink_lifted - highest)
        w_total = w_others + tl.sum(tl.where(slot == 0, w, 0.0), 1)
        change = tl.where(slot > 0, w / w_total[:, None] - e / total[:, None], 0.0)
        of_largest = w_others / w_total - others / total
        in_tail = w_square / w_total / w_total - 2.0 * (w_e / w_total / total) + tail_square / total / total
        whole = tl.sqrt(tl.sum(change * change, 1) + of_largest * of_largest + tl.maximum(in_tail, 0.0))
        reach = tl.load(own + R_REACH * num_total, mask=seen, other=0.0)
        if SINK:
            reach = tl.maximum(reach, -origin * stretch)
        length = tl.where((reach > EXPONENT_LIMIT) | (1.0 + mean < LEAST_SHARE), whole, length)
    return length


@triton.jit
def _geometry(
    own, at, place, mask, seen, x, s, g, first_sequence, sequence_step, nearest, near_square, near_excess, s_vectors,
    slot, exists, count, num_total, x_stride_b, x_stride_h, x_stride_l, x_stride_d,
    KP: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """N_s, Z d~, and whether a visible token vector is not finite; each [BR].

    Of the keys beyond the K largest, the one whose excess is least is read again, and its distance to s taken
    difference by difference.
    """
    s_square = tl.load(own + R_S_SQUARE * num_total, mask=seen, other=0.0)
    split = tl.arange(0, SPLITS)
    excesses = tl.load(place + P_LEAST * num_total, mask=mask, other=INFINITY)
    tail_excess, best = tl.min(excesses, 1, return_indices=True, return_indices_tie_break_left=True)
    is_best = split[None, :] == best[:, None]
    e_nearest = tl.sum(tl.where(is_best, tl.load(place + P_LEAST_E * num_total, mask=mask, other=0.0), 0.0), 1)
    numbers = tl.load(nearest + split[None, :] * num_total + at[:, None], mask=mask, other=0)
    key = tl.sum(tl.where(is_best, numbers, 0), 1).to(tl.int64)
    far = tl.sum(tl.load(place + P_FAR * num_total, mask=mask, other=0.0), 1)
    broken = tl.load(own + R_BROKEN * num_total, mask=seen, other=0.0)
    broken = tl.maximum(broken, (far != far).to(tl.float32))

    has_tail = seen & (tail_excess < INFINITY)
    b = first_sequence + s * sequence_step
    x_key = x + b * x_stride_b + g * x_stride_h + tl.where(has_tail, key, 0) * x_stride_l
    square = tl.zeros([BR], tl.float32)
    for first in range(0, E, BE):
        d = first + tl.arange(0, BE)
        read = has_tail[:, None] & (d < E)[None, :]
        vector = tl.load(x_key[:, None] + d[None, :] * x_stride_d, mask=read, other=0.0).to(tl.float32)
        square += tl.sum(vector * vector, 1)
    factor = e_nearest
    if TOKENS == 1:
        factor = e_nearest / tl.where(square > 0.0, tl.sqrt(square), 1.0)
    exact_square = tl.zeros([BR], tl.float32)
    exact_excess = tl.zeros([BR], tl.float32)
    for first in range(0, E, BE):
        d = first + tl.arange(0, BE)
        read = has_tail[:, None] & (d < E)[None, :]
        vector = tl.load(x_key[:, None] + d[None, :] * x_stride_d, mask=read, other=0.0).to(tl.float32)
        center = tl.load(s_vectors + at[:, None] * E + d[None, :], mask=read, other=0.0)
        weighted = vector * factor[:, None]
        away = weighted - center
        exact_square += tl.sum(away * away, 1)
        exact_excess += tl.sum(weighted * (away - center), 1)

    spot = at[:, None] * KP + slot
    to_s = tl.load(near_square + spot, mask=exists, other=0.0)
    excess = tl.load(near_excess + spot, mask=exists, other=0.0)
    outside = exists & (slot >= N)
    inside = exists & (slot < N)
    radius = tl.min(tl.where(outside, excess, INFINITY), 1)
    radius = tl.minimum(radius, tl.where(has_tail, exact_excess, INFINITY))
    radius_square = tl.min(tl.where(outside, to_s, INFINITY), 1)
    radius_square = tl.minimum(radius_square, tl.where(has_tail, exact_square, INFINITY))
    close = radius_square < s_square * CANCELS
    by_square = tl.sum((inside & (to_s < radius_square[:, None])).to(tl.float32), 1)
    by_excess = tl.sum((inside & (excess < radius[:, None])).to(tl.float32), 1)
    within = tl.where(close, by_square, by_excess)

    told = tl.sqrt(tl.maximum(tail_excess + s_square, 0.0))
    far += tl.where(has_tail & (exact_square < s_square * CANCELS), tl.sqrt(exact_square) - told, 0.0)
    distance = far + tl.sum(tl.where(outside, tl.sqrt(to_s), 0.0), 1)
    return within, tl.maximum(distance, 0.0), broken


@triton.jit
def _add(accumulator, COLUMN: tl.constexpr, num_heads, head, total):
    """Add the sum of ``total`` [BR] to column COLUMN."""
    at = accumulator + COLUMN * num_heads + head
    tl.store(at, tl.load(at) + tl.sum(total, 0))


@triton.jit
def _put(accumulator, COLUMN: tl.constexpr, num_heads, head, total, number):
    """Add the sums of ``total`` and ``number`` [BR], a metric and its rows, to columns COLUMN and COLUMN + 1."""
    if COLUMN >= 0:
        _add(accumulator, COLUMN, num_heads, head, total)
        _add(accumulator, COLUMN + 1, num_heads, head, number)


@triton.jit
def _raise(accumulator, COLUMN: tl.constexpr, num_heads, head, value):
    """Lift the maximum in column COLUMN to the largest ``value`` [BR]."""
    if COLUMN >= 0:
        at = accumulator + COLUMN * num_heads + head
        tl.store(at, tl.maximum(tl.load(at), tl.max(value, 0)))


@triton.jit(do_not_specialize=["first_sequence", "sequence_step", "num_rows", "num_groups", "num_here"])
def finish(
    partial_spread, nearest, record, list_z, list_i, near_square, near_excess, s_vectors, rows, table, live, sinks, x,
    accumulator, tau, epsilon,
    first_sequence, sequence_step, num_rows, num_groups, num_here, num_total, num_heads, row_stride, field_stride,
    x_stride_b, x_stride_h, x_stride_l, x_stride_d,
    GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    LIVE: tl.constexpr, SINK: tl.constexpr, FD: tl.constexpr, TABLE: tl.constexpr, JACOBIAN: tl.constexpr,
    TOKENS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
    ENTROPY: tl.constexpr, ENTROPY_NORM: tl.constexpr, LOGIT_STD: tl.constexpr, MAX_PROB: tl.constexpr,
    TOP_MASS: tl.constexpr, FIRST_MASS: tl.constexpr, SINK_MASS: tl.constexpr, SEPARABILITY: tl.constexpr,
    JACOBIAN_MEAN: tl.constexpr, JACOBIAN_FD: tl.constexpr, DISTANCE: tl.constexpr, MAX_LOGIT: tl.constexpr,
    MAX_UNCAPPED: tl.constexpr, JACOBIAN_MAX: tl.constexpr,
):  # fmt: skip
    """Add the rows of one head to the accumulator [columns, H].

    One program per head adds its rows one after the other, so that the order of additions is always the same. The
    package's docstring says what each argument is.
    """
    head = tl.program_id(0)
    g = (head // GROUP).to(tl.int64)
    in_group = head % GROUP
    slot = tl.arange(0, KP)[None, :]
    nothing = tl.zeros([BR], tl.float64)
    none = tl.zeros([BR], tl.int64)
    number, masked, nonfinite, paired, selections, spans = none, none, none, none, none, none
    entropy_sum, norm_sum, std_sum, prob_sum, top_sum = nothing, nothing, nothing, nothing, nothing
    first_sum, sink_sum, separability_sum, jacobian_sum = nothing, nothing, nothing, nothing
    fd_sum, distance_sum = nothing, nothing
    max_logit = tl.full([BR], float("-inf"), tl.float64)
    max_uncapped = tl.full([BR], float("-inf"), tl.float64)
    jacobian_max = tl.full([BR], float("-inf"), tl.float64)
    positions = num_rows // GROUP

    for start in range(0, num_here, BR):
        i = start + tl.arange(0, BR)
        seen = i < num_here
        s = (i // positions).to(tl.int64)
        r = i % positions
        at = (s * num_groups + g) * num_rows + r * GROUP + in_group
        own = record + at
        largest = tl.load(own + R_MAX * num_total, mask=seen, other=0.0)
        count = tl.load(own + R_COUNT * num_total, mask=seen, other=0.0)
        bad = tl.load(own + R_BAD * num_total, mask=seen, other=0.0)
        others = tl.load(own + R_OTHERS * num_total, mask=seen, other=0.0)
        asked = seen
        if LIVE:
            asked &= tl.load(live + s * row_stride + r, mask=seen, other=0) != 0
        sees = asked & (count >= 1.0)
        valid = sees & (bad == 0.0)
        lead = largest
        sink = others
        key_total = 1.0 + others
        if SINK:
            logit = tl.load(sinks + head + 0 * i, mask=seen, other=0.0).to(tl.float32)
            valid &= logit < INFINITY
            lead = sink_lead(sinks, head + 0 * i, largest, seen)
            sink = tl.exp(lead)
            others += sink
        total = 1.0 + others
        pair = valid & (count >= 2.0)
        number += valid.to(tl.int64)
        masked += (asked & (count < 1.0)).to(tl.int64)
        nonfinite += (sees & (valid == 0)).to(tl.int64)
        paired += pair.to(tl.int64)

        spread_dot = tl.load(own + R_DOT * num_total, mask=seen, other=0.0)
        log_total = log1p(others)
        outcomes = count
        if SINK:
            log_total = tl.where(lead > 0.0, log1p(key_total / sink), log_total)
            spread_dot += tl.where(lead > 0.0, -lead * key_total, sink * lead)
            outcomes += 1.0
            sink_sum += tl.where(valid, sink / total, 0.0).to(tl.float64)
        entropy = log_total - spread_dot / total
        entropy_sum += tl.where(valid, entropy, 0.0).to(tl.float64)
        ratio = entropy / tl.maximum(tl.log(tl.maximum(outcomes, 1.0)), LEAST_LOG)
        norm_sum += tl.where(pair, ratio, 0.0).to(tl.float64)
        std = tl.load(own + R_STD * num_total, mask=seen, other=0.0)
        std_sum += tl.where(valid, std, 0.0).to(tl.float64)
        prob_sum += tl.where(valid, 1.0 / total, 0.0).to(tl.float64)
        top = tl.load(own + R_TOP * num_total, mask=seen, other=0.0)
        top_sum += tl.where(valid, top / total, 0.0).to(tl.float64)
        first = tl.load(own + R_FIRST * num_total, mask=seen, other=0.0)
        first_sum += tl.where(valid, first / total, 0.0).to(tl.float64)
        max_logit = tl.maximum(max_logit, tl.where(valid, largest, float("-inf")).to(tl.float64))
        if MAX_UNCAPPED >= 0:
            raw = tl.load(own + R_UNCAPPED * num_total, mask=seen, other=0.0)
            max_uncapped = tl.maximum(max_uncapped, tl.where(valid, raw, float("-inf")).to(tl.float64))

        if JACOBIAN or FD > 0 or TOKENS > 0:
            top_z = tl.load(list_z + at[:, None] * KP + slot, mask=seen[:, None], other=float("-inf"))
            exists = seen[:, None] & (top_z > float("-inf"))
            depth = tl.where(exists, top_z - largest[:, None], float("-inf"))
            e = tl.exp(depth)
            split = tl.arange(0, SPLITS)
            place = partial_spread + split[None, :] * (P_FIELDS * num_total) + at[:, None]
            mask = seen[:, None] & (split >= 0)[None, :]
        if JACOBIAN:
            second_depth = tl.max(tl.where(slot == 1, depth, float("-inf")), 1)
            root = _eigenvalue(own, place, mask, seen, e, slot, second_depth, sink, num_total, SINK)
            jacobian = root / total / tau
            jacobian_sum += tl.where(valid, jacobian, 0.0).to(tl.float64)
            jacobian_max = tl.maximum(jacobian_max, tl.where(valid, jacobian, float("-inf")).to(tl.float64))
        if FD > 0:
            key = tl.load(list_i + at[:, None] * KP + slot, mask=exists, other=0)
            offset = tl.load(rows + s * row_stride + r + T_DIRECTION * field_stride, mask=seen, other=0)
            entries = tl.load(table + ((offset[:, None] + key) & (TABLE - 1)), mask=exists, other=0.0)
            tail_square = tl.load(own + R_TAIL_SQUARE * num_total, mask=seen, other=0.0)
            length = _moved(
                own, place, mask, seen, e, depth, slot, entries, total, others, tail_square, sink, lead, num_total,
                FD, SINK,
            )  # fmt: skip
            fd_sum += tl.where(valid, length / epsilon, 0.0).to(tl.float64)
        if TOKENS > 0:
            within, distance, broken = _geometry(
                own, at, place, mask, seen, x, s, g, first_sequence, sequence_step, nearest, near_square, near_excess,
                s_vectors, slot, exists, count, num_total, x_stride_b, x_stride_h, x_stride_l, x_stride_d,
                KP, K, N, SPLITS, TOKENS, E, BE, BR,
            )  # fmt: skip
            has_outside = count > N
            distance = tl.where(has_outside, distance / total, 0.0)
            spanned = valid & (broken == 0.0) & (tl.abs(distance) < INFINITY)
            distance_sum += tl.where(spanned, distance, 0.0).to(tl.float64)
            spans += spanned.to(tl.int64)
            selected = valid & has_outside & (broken == 0.0)
            share = within / N
            if N == 1:  # the one selected key lies at distance 0; a tie at 0 is not held against it
                share = within * 0.0 + 1.0
            separability_sum += tl.where(selected, share, 0.0).to(tl.float64)
            selections += selected.to(tl.int64)

    _add(accumulator, A_VALID, num_heads, head, number)
    _add(accumulator, A_MASKED, num_heads, head, masked)
    _add(accumulator, A_NONFINITE, num_heads, head, nonfinite)
    _put(accumulator, ENTROPY, num_heads, head, entropy_sum, number)
    _put(accumulator, ENTROPY_NORM, num_heads, head, norm_sum, paired)
    _put(accumulator, LOGIT_STD, num_heads, head, std_sum, number)
    _put(accumulator, MAX_PROB, num_heads, head, prob_sum, number)
    _put(accumulator, TOP_MASS, num_heads, head, top_sum, number)
    _put(accumulator, FIRST_MASS, num_heads, head, first_sum, number)
    _put(accumulator, SINK_MASS, num_heads, head, sink_sum, number)
    _put(accumulator, SEPARABILITY, num_heads, head, separability_sum, selections)
    _put(accumulator, JACOBIAN_MEAN, num_heads, head, jacobian_sum, number)
    _put(accumulator, JACOBIAN_FD, num_heads, head, fd_sum, number)
    _put(accumulator, DISTANCE, num_heads, head, distance_sum, spans)
    _raise(accumulator, MAX_LOGIT, num_heads, head, max_logit)
    _raise(accumulator, MAX_UNCAPPED, num_heads, head, max_uncapped)
    _raise(accumulator, JACOBIAN_MAX, num_heads, head, jacobian_max)
