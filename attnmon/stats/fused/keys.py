"""The two passes over the keys: ``select`` reads K, ``spread`` reads K again and the token vectors.

A program owns a tile: BM rows (sampled positions x query heads) of one sequence and key head, and one of SPLITS
parts of the keys that any of its rows can see. Nothing of size rows x Lk leaves it: a part of the keys is a few
numbers per row, which ``merge`` and ``finish`` join. Both passes get a logit by the same operations on the same tiles,
so that a row's K-th largest logit, found by the first, parts the keys exactly in the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmon.stats.fused.fields import (
    EXPONENT_LIMIT,
    INFINITY,
    LOWEST,
    NOWHERE,
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
    R_DIRECTION,
    R_MAX,
    R_MU,
    R_S_SQUARE,
    R_SECOND,
    R_STEP,
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
    T_FIRST,
)
from attnmon.stats.fused.math import expm1, just_above
from attnmon.stats.fused.tiles import directions, keys_of_split, products, query_chunk, rows_of_tile, visible_logits


@triton.jit(do_not_specialize=["first_sequence", "sequence_step", "num_tiles", "num_groups", "num_keys"])
def select(
    q, k, rows, padding, mask, table, partial_select, part_z, part_i,
    scale, softcap, padding_least, mask_least,
    first_sequence, sequence_step, num_rows, num_tiles, num_groups, num_keys, num_total, row_stride, field_stride,
    q_stride_b, q_stride_h, q_stride_l, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    padding_stride_b, padding_stride_l, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    GROUP: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SPLITS: tl.constexpr, PADDING: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr, FD: tl.constexpr,
    TABLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """First pass: the K largest logits of each row, and sums over the others.

    The package's docstring says what each argument is.
    """
    pid = tl.program_id(0)
    split = pid % SPLITS
    tile = pid // SPLITS % num_tiles
    sg = pid // (SPLITS * num_tiles)
    s = (sg // num_groups).to(tl.int64)
    g = (sg % num_groups).to(tl.int64)
    b = first_sequence + s * sequence_step
    row, inside, at, position, low, high = rows_of_tile(rows, row_stride, field_stride, s, tile, num_rows, GROUP, BM)
    head = g * GROUP + row % GROUP
    first_key = tl.load(at + T_FIRST * field_stride, mask=inside, other=-1)
    offset = tl.load(at + T_DIRECTION * field_stride, mask=inside, other=0)
    start, stop = keys_of_split(low, high, split, SPLITS, BN)
    q_rows = q + b * q_stride_b + head * q_stride_h + position.to(tl.int64) * q_stride_l
    q_first = query_chunk(q_rows, q_stride_d, inside, 0, D, BD)
    k_base = k + b * k_stride_b + g * k_stride_h
    mask_rows = mask + b * mask_stride_b + head * mask_stride_h + position.to(tl.int64) * mask_stride_q

    n = tl.arange(0, BN)
    slot = tl.arange(0, KP)[None, :]
    kept_z = tl.full([BM, KP], float("-inf"), tl.float32)
    kept_i = tl.zeros([BM, KP], tl.int32) + (NOWHERE - slot)  # told apart, and the first to be replaced
    largest = tl.full([BM], LOWEST, tl.float32)
    tail = tl.zeros([BM], tl.float32)
    tail_square = tl.zeros([BM], tl.float32)
    tail_dot = tl.zeros([BM], tl.float32)
    count = tl.zeros([BM], tl.float32)
    mean = tl.zeros([BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    first_z = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    farthest = tl.full([BM], float("-inf"), tl.float32)
    uncapped = tl.full([BM], float("-inf"), tl.float32)
    bad = tl.zeros([BM], tl.int32)

    for block in range(start, stop, BN):
        j = block + n
        product = products(
            q_first, q_rows, q_stride_d, inside, k_base + tl.cast(block, tl.int64) * k_stride_l, k_stride_l, k_stride_d,
            num_keys - block, D, BM, BN, BD, WIDEN,
        )  # fmt: skip
        z, raw, visible = visible_logits(
            product, scale, softcap, low, high, block, padding + b * padding_stride_b, padding_stride_l, padding_least,
            mask_rows, mask_stride_k, mask_least, num_keys, BN, PADDING, MASK, CAP,
        )  # fmt: skip
        finite = tl.abs(z) < INFINITY
        bad = tl.maximum(bad, tl.max((visible & (finite == 0)).to(tl.int32), 1))
        z = tl.where(visible & finite, z, float("-inf"))
        if CAP:
            uncapped = tl.maximum(uncapped, tl.max(tl.where(visible, raw, float("-inf")), 1))
        first_z = tl.maximum(first_z, tl.max(tl.where(j[None, :] == first_key[:, None], z, float("-inf")), 1))
        if FD > 0:
            direction = directions(table, offset, j, visible, TABLE)
            norm += tl.sum(direction * direction, 1)
            if FD == 2:
                farthest = tl.maximum(farthest, tl.max(tl.where(visible, direction, float("-inf")), 1))

        block_largest, place = tl.max(z, 1, return_indices=True, return_indices_tie_break_left=True)
        new = tl.maximum(largest, block_largest)
        shift = largest - new  # <= 0
        # mean and squares of z - new (Chan, Golub, LeVeque): blocks merge without cancellation
        here = tl.sum(visible.to(tl.float32), 1)
        below = tl.where(visible & finite, z - new[:, None], 0.0)
        block_mean = tl.sum(below, 1) / tl.maximum(here, 1.0)
        centered = tl.where(visible, below - block_mean[:, None], 0.0)
        total = tl.maximum(count + here, 1.0)
        mean = tl.where(count > 0.0, mean + shift, block_mean)
        gap = tl.where(here > 0.0, block_mean - mean, 0.0)
        squares += tl.sum(centered * centered, 1) + gap * gap * count * here / total
        mean += gap * here / total
        count += here

        # The block's largest key takes the place of the least one kept, which takes its place in the block, until no
        # key of the block belongs among the K largest. Of equal keys the first stays: blocks ascend.
        least = tl.min(tl.where(slot < K, kept_z, INFINITY), 1)
        taken = block_largest > least
        while tl.max(taken.to(tl.int32), 0) > 0:
            lowest = (kept_z == least[:, None]) & (slot < K)
            last = tl.max(tl.where(lowest, kept_i, -1), 1)
            out = lowest & (kept_i == last[:, None]) & taken[:, None]
            kept_z = tl.where(out, block_largest[:, None], kept_z)
            kept_i = tl.where(out, (block + place)[:, None], kept_i)
            z = tl.where((n[None, :] == place[:, None]) & taken[:, None], least[:, None], z)
            block_largest, place = tl.max(z, 1, return_indices=True, return_indices_tie_break_left=True)
            least = tl.min(tl.where(slot < K, kept_z, INFINITY), 1)
            taken = block_largest > least

        decay = tl.exp(shift)
        depth = z - new[:, None]
        e = tl.exp(depth)
        tail_dot = decay * (tail_dot + shift * tail) + tl.sum(tl.where(e > 0.0, e * depth, 0.0), 1)
        tail = decay * tail + tl.sum(e, 1)
        tail_square = decay * decay * tail_square + tl.sum(e * e, 1)
        largest = new

    at_row = sg * num_rows + row  # below 2**31: the scratch is bounded
    out_row = partial_select + split * (S_FIELDS * num_total) + at_row
    tl.store(out_row + S_MAX * num_total, largest, mask=inside)
    tl.store(out_row + S_TAIL * num_total, tail, mask=inside)
    tl.store(out_row + S_TAIL_SQUARE * num_total, tail_square, mask=inside)
    tl.store(out_row + S_TAIL_DOT * num_total, tail_dot, mask=inside)
    tl.store(out_row + S_COUNT * num_total, count, mask=inside)
    tl.store(out_row + S_MEAN * num_total, mean, mask=inside)
    tl.store(out_row + S_SQUARES * num_total, squares, mask=inside)
    tl.store(out_row + S_FIRST * num_total, first_z, mask=inside)
    tl.store(out_row + S_NORM * num_total, norm, mask=inside)
    tl.store(out_row + S_FARTHEST * num_total, farthest, mask=inside)
    tl.store(out_row + S_UNCAPPED * num_total, uncapped, mask=inside)
    tl.store(out_row + S_BAD * num_total, bad.to(tl.float32), mask=inside)
    place_of = (at_row * SPLITS + split)[:, None] * KP + slot
    tl.store(part_z + place_of, kept_z, mask=inside[:, None])
    tl.store(part_i + place_of, kept_i, mask=inside[:, None])


@triton.jit
def _pull_chunk(
    product, square, first, s_rows, length_s, inside, x_block, x_stride_l, x_stride_d, num_here,
    E: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, TERMS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    d = first + tl.arange(0, BE)
    s = tl.load(s_rows[:, None] + d[None, :], mask=inside[:, None] & (d < E)[None, :], other=0.0)
    x = tl.load(
        x_block + n[:, None] * x_stride_l + d[None, :] * x_stride_d,
        mask=(n < num_here)[:, None] & (d < E)[None, :],
        other=0.0,
    )
    wide = x.to(tl.float32)
    square += tl.sum(wide * wide, 1)
    if TERMS == 1:
        product = tl.dot(s, tl.trans(x), product, input_precision="ieee")
    else:
        if TERMS == 2:
            s /= length_s[:, None]
        turned = tl.trans(wide if WIDEN else x)
        for _ in tl.static_range(TERMS):
            part = s.to(x.dtype)
            s -= part.to(tl.float32)
            product = tl.dot(part.to(turned.dtype), turned, product, input_precision="ieee")
    return product, square


@triton.jit
def _pull(
    s_rows, length_s, inside, x_block, x_stride_l, x_stride_d, num_here,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr, TERMS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """s.x of a tile's rows and a block of token vectors, [BM, BN], and |x|^2, [BN]; both float32.

    x stays in its own 16 bits: s is taken apart into TERMS numbers of that width (two of float16, three of bfloat16),
    which hold 22 or 24 of its bits, so that nothing is lost to the narrow type. float16 also needs s at unit length.
    """
    product = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BN], tl.float32)
    if E <= 4 * BE:
        for first in tl.static_range(0, E, BE):
            product, square = _pull_chunk(
                product, square, first, s_rows, length_s, inside, x_block, x_stride_l, x_stride_d, num_here,
                E, BN, BE, TERMS, WIDEN,
            )  # fmt: skip
    else:  # unrolled, so many chunks would not fit the registers
        for first in range(0, E, BE):
            product, square = _pull_chunk(
                product, square, first, s_rows, length_s, inside, x_block, x_stride_l, x_stride_d, num_here,
                E, BN, BE, TERMS, WIDEN,
            )  # fmt: skip
    if TERMS == 2:
        product *= length_s[:, None]
    return product, square


@triton.jit(do_not_specialize=["first_sequence", "sequence_step", "num_tiles", "num_groups", "num_keys"])
def spread(
    q, k, x, rows, padding, mask, table, record, list_z, list_i, s_vectors, partial_spread, nearest,
    scale, softcap, padding_least, mask_least,
    first_sequence, sequence_step, num_rows, num_tiles, num_groups, num_keys, num_total, row_stride, field_stride,
    q_stride_b, q_stride_h, q_stride_l, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    x_stride_b, x_stride_h, x_stride_l, x_stride_d,
    padding_stride_b, padding_stride_l, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k,
    GROUP: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SPLITS: tl.constexpr, PADDING: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr, FD: tl.constexpr,
    TABLE: tl.constexpr, JACOBIAN: tl.constexpr, TOKENS: tl.constexpr, E: tl.constexpr, TERMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Second pass: what depends on a row's largest logit, its K largest and s; sums over the other keys.

    The package's docstring says what each argument is.
    """
    pid = tl.program_id(0)
    split = pid % SPLITS
    tile = pid // SPLITS % num_tiles
    sg = pid // (SPLITS * num_tiles)
    s = (sg // num_groups).to(tl.int64)
    g = (sg % num_groups).to(tl.int64)
    b = first_sequence + s * sequence_step
    row, inside, at, position, low, high = rows_of_tile(rows, row_stride, field_stride, s, tile, num_rows, GROUP, BM)
    head = g * GROUP + row % GROUP
    offset = tl.load(at + T_DIRECTION * field_stride, mask=inside, other=0)
    start, stop = keys_of_split(low, high, split, SPLITS, BN)
    q_rows = q + b * q_stride_b + head * q_stride_h + position.to(tl.int64) * q_stride_l
    q_first = query_chunk(q_rows, q_stride_d, inside, 0, D, BD)
    k_base = k + b * k_stride_b + g * k_stride_h
    mask_rows = mask + b * mask_stride_b + head * mask_stride_h + position.to(tl.int64) * mask_stride_q

    at_row = sg * num_rows + row  # below 2**31: the scratch is bounded
    own = record + at_row
    largest = tl.load(own + R_MAX * num_total, mask=inside, other=0.0)
    last_z = tl.load(list_z + at_row * KP + (K - 1), mask=inside, other=float("-inf"))
    last_i = tl.load(list_i + at_row * KP + (K - 1), mask=inside, other=0)
    if JACOBIAN:
        root = tl.load(own + R_MU * num_total, mask=inside, other=1.0) + tl.load(
            own + R_SECOND * num_total, mask=inside, other=1.0
        )
        above = just_above(root)
        ratio_sum = tl.zeros([BM], tl.float32)
        ratio_square = tl.zeros([BM], tl.float32)
    if FD > 0:
        step = tl.load(own + R_STEP * num_total, mask=inside, other=0.0)
        origin = tl.load(own + R_DIRECTION * num_total, mask=inside, other=0.0)
        move = tl.zeros([BM], tl.float32)
        move_e = tl.zeros([BM], tl.float32)
        move_square = tl.zeros([BM], tl.float32)
        if FD == 2:
            moved_max = tl.full([BM], LOWEST, tl.float32)
            moved = tl.zeros([BM], tl.float32)
            moved_square = tl.zeros([BM], tl.float32)
            moved_e = tl.zeros([BM], tl.float32)
    if TOKENS > 0:
        s_square = tl.load(own + R_S_SQUARE * num_total, mask=inside, other=0.0)
        length_s = s_square
        if TERMS == 2:
            length_s = tl.where(s_square > 0.0, tl.sqrt(s_square), 1.0)
        far = tl.zeros([BM], tl.float32)
        least = tl.full([BM], INFINITY, tl.float32)
        least_e = tl.zeros([BM], tl.float32)
        least_i = tl.zeros([BM], tl.int32)
        x_base = x + b * x_stride_b + g * x_stride_h

    for block in range(start, stop, BN):
        j = block + tl.arange(0, BN)
        product = products(
            q_first, q_rows, q_stride_d, inside, k_base + tl.cast(block, tl.int64) * k_stride_l, k_stride_l, k_stride_d,
            num_keys - block, D, BM, BN, BD, WIDEN,
        )  # fmt: skip
        z, _, visible = visible_logits(
            product, scale, softcap, low, high, block, padding + b * padding_stride_b, padding_stride_l, padding_least,
            mask_rows, mask_stride_k, mask_least, num_keys, BN, PADDING, MASK, CAP,
        )  # fmt: skip
        beyond = (z < last_z[:, None]) | ((z == last_z[:, None]) & (j[None, :] > last_i[:, None]))
        beyond &= visible
        # no higher than the last one kept, not even by a rounding: the eigenvalue's poles depend on it
        depth = tl.minimum(z - largest[:, None], (last_z - largest)[:, None])
        depth = tl.where(beyond, depth, float("-inf"))
        e = tl.exp(depth)
        if JACOBIAN:
            ratio = e / (above[:, None] - e)
            ratio_sum += tl.sum(ratio, 1)
            ratio_square += tl.sum(ratio * ratio, 1)
        if FD > 0:
            ahead = (directions(table, offset, j, visible, TABLE) - origin[:, None]) * step[:, None]
            y = tl.where(beyond, expm1(tl.minimum(ahead, EXPONENT_LIMIT)), 0.0)
            ey = e * y
            move += tl.sum(ey, 1)
            move_e += tl.sum(e * ey, 1)
            move_square += tl.sum(ey * ey, 1)
            if FD == 2:
                lifted = depth + tl.where(beyond, ahead, 0.0)
                new = tl.maximum(moved_max, tl.max(lifted, 1))
                decay = tl.exp(moved_max - new)
                w = tl.exp(lifted - new[:, None])
                moved = moved * decay + tl.sum(w, 1)
                moved_square = moved_square * decay * decay + tl.sum(w * w, 1)
                moved_e = moved_e * decay + tl.sum(w * e, 1)
                moved_max = new
        if TOKENS > 0:
            pull, square = _pull(
                s_vectors + at_row * E, length_s, inside, x_base + tl.cast(block, tl.int64) * x_stride_l, x_stride_l,
                x_stride_d, num_keys - block, E, BM, BN, BE, TERMS, WIDEN,
            )  # fmt: skip
            weight = e
            if TOKENS == 1:
                weight = e / tl.where(square > 0.0, tl.sqrt(square), 1.0)[None, :]
            # D^2 - |s|^2 = w (w |x|^2 - 2 s.x), w = e or e / |x|
            excess = weight * (weight * square[None, :] - 2.0 * pull)
            excess = tl.where(beyond, excess, INFINITY)
            distance = tl.sqrt(tl.maximum(excess + s_square[:, None], 0.0))
            distance = tl.where(beyond, distance, 0.0)
            far += tl.sum(tl.where(visible & ((square < INFINITY) == 0)[None, :], float("nan"), distance), 1)
            block_least, place = tl.min(excess, 1, return_indices=True, return_indices_tie_break_left=True)
            nearer = block_least < least
            found = tl.sum(tl.where(tl.arange(0, BN)[None, :] == place[:, None], e, 0.0), 1)
            least = tl.where(nearer, block_least, least)
            least_e = tl.where(nearer, found, least_e)
            least_i = tl.where(nearer, block + place, least_i)

    out_row = partial_spread + split * (P_FIELDS * num_total) + at_row
    if JACOBIAN:
        tl.store(out_row + P_RATIO * num_total, ratio_sum, mask=inside)
        tl.store(out_row + P_RATIO_SQUARE * num_total, ratio_square, mask=inside)
    if FD > 0:
        tl.store(out_row + P_MOVE * num_total, move, mask=inside)
        tl.store(out_row + P_MOVE_E * num_total, move_e, mask=inside)
        tl.store(out_row + P_MOVE_SQUARE * num_total, move_square, mask=inside)
        if FD == 2:
            tl.store(out_row + P_MOVED_MAX * num_total, moved_max, mask=inside)
            tl.store(out_row + P_MOVED * num_total, moved, mask=inside)
            tl.store(out_row + P_MOVED_SQUARE * num_total, moved_square, mask=inside)
            tl.store(out_row + P_MOVED_E * num_total, moved_e, mask=inside)
    if TOKENS > 0:
        tl.store(out_row + P_FAR * num_total, far, mask=inside)
        tl.store(out_row + P_LEAST * num_total, least, mask=inside)
        tl.store(out_row + P_LEAST_E * num_total, least_e, mask=inside)
        tl.store(nearest + split * num_total + at_row, least_i, mask=inside)
