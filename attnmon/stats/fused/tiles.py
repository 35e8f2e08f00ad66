"""A tile of rows and a block of keys: which they are, their logits, who sees whom, and the rows' directions."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmon.stats.fused.fields import NOWHERE, T_HIGH, T_LOW, T_POSITION
from attnmon.stats.fused.math import tanh


@triton.jit
def rows_of_tile(rows, row_stride, field_stride, s, tile, num_rows, GROUP: tl.constexpr, BM: tl.constexpr):
    """The rows of a tile: BM rows of sampled sequence s and of one key head, from row tile * BM on.

    Returns, each [BM]:
        row: numbers within the sequence and key head.
        inside: whether there is such a row.
        at: pointers to the rows' entries in ``rows``.
        position: of the query.
        low, high: range of keys that the row can see at most.
    """
    row = tile * BM + tl.arange(0, BM)
    inside = row < num_rows
    at = rows + s * row_stride + row // GROUP
    position = tl.load(at + T_POSITION * field_stride, mask=inside, other=0)
    low = tl.load(at + T_LOW * field_stride, mask=inside, other=0)
    high = tl.load(at + T_HIGH * field_stride, mask=inside, other=0)
    return row, inside, at, position, low, high


@triton.jit
def keys_of_split(low, high, split, SPLITS: tl.constexpr, BN: tl.constexpr):
    """[start, stop) of one of SPLITS parts of the keys that any row of a tile can see, in whole blocks of BN.

    Args:
        low, high: [BM], range of keys that each row can see at most.
        split: which part.
    """
    sees = high > low
    begin = tl.min(tl.where(sees, low, NOWHERE), 0) // BN * BN
    end = tl.max(tl.where(sees, high, 0), 0)
    begin = tl.minimum(begin, end)
    chunk = (end - begin + SPLITS * BN - 1) // (SPLITS * BN) * BN
    start = begin + split * chunk
    return start, tl.minimum(start + chunk, end)


@triton.jit
def query_chunk(q_rows, q_stride_d, inside, first, D: tl.constexpr, BD: tl.constexpr):
    """BD dimensions of the tile's queries, from ``first`` on; [BM, BD] in their own dtype, 0 beyond D."""
    d = first + tl.arange(0, BD)
    return tl.load(q_rows[:, None] + d[None, :] * q_stride_d, mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _product_chunk(
    product, q, first, k_block, k_stride_l, k_stride_d, num_here,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    d = first + tl.arange(0, BD)
    k = tl.load(
        k_block + n[:, None] * k_stride_l + d[None, :] * k_stride_d,
        mask=(n < num_here)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if WIDEN:
        q, k = q.to(tl.float32), k.to(tl.float32)
    return tl.dot(q, tl.trans(k), product, input_precision="ieee")


@triton.jit
def products(
    q_first, q_rows, q_stride_d, inside, k_block, k_stride_l, k_stride_d, num_here,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """q.k of a tile's rows and a block of keys, float32 [BM, BN].

    Args:
        q_first: [BM, BD], the queries' first chunk, as of ``query_chunk``.
        q_rows: [BM], pointers to the queries.
        inside: bool [BM], which rows exist.
        k_block: pointer to the block's first key.
        num_here: keys that exist from there on.
        WIDEN: 16-bit numbers are multiplied as float32; the products are exact either way.
    """
    product = tl.zeros([BM, BN], tl.float32)
    if D <= BD:
        product = _product_chunk(product, q_first, 0, k_block, k_stride_l, k_stride_d, num_here, D, BN, BD, WIDEN)
    elif D <= 4 * BD:
        for first in tl.static_range(0, D, BD):
            q = query_chunk(q_rows, q_stride_d, inside, first, D, BD)
            product = _product_chunk(product, q, first, k_block, k_stride_l, k_stride_d, num_here, D, BN, BD, WIDEN)
    else:  # unrolled, so many chunks would not fit the registers
        for first in range(0, D, BD):
            q = query_chunk(q_rows, q_stride_d, inside, first, D, BD)
            product = _product_chunk(product, q, first, k_block, k_stride_l, k_stride_d, num_here, D, BN, BD, WIDEN)
    return product


@triton.jit
def visible_logits(
    product, scale, softcap, low, high, start, padding_row, padding_stride, padding_least,
    mask_rows, mask_stride, mask_least, num_keys,
    BN: tl.constexpr, PADDING: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Logits z of a block of keys, z without the softcap, and which keys are visible; each [BM, BN].

    Args:
        product: [BM, BN], of ``products``.
        low, high: [BM], range of keys that each row can see at most.
        start: the block's first key.
        padding_row: pointer to the sequence's padding mask.
        mask_rows: [BM], pointers to the rows' attention masks.
        PADDING, MASK: 0 none, 1 bool, 2 float.
    """
    j = start + tl.arange(0, BN)
    visible = (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
    z = product * scale
    raw = z
    if CAP:
        z = softcap * tanh(z / softcap)
    if PADDING > 0:
        padding = tl.load(padding_row + j.to(tl.int64) * padding_stride, mask=j < num_keys, other=0)
        if PADDING == 1:
            visible &= (padding == 0)[None, :]
        else:
            bias = padding.to(tl.float32)
            visible &= ((bias <= padding_least) == 0)[None, :]
            z += bias[None, :]
            raw += bias[None, :]
    if MASK > 0:
        mask = tl.load(mask_rows[:, None] + j.to(tl.int64)[None, :] * mask_stride, mask=visible, other=0)
        if MASK == 1:
            visible &= mask != 0
        else:
            added = mask.to(tl.float32)
            visible &= (added <= mask_least) == 0
            z += added
            raw += added
    return z, raw, visible


@triton.jit
def directions(table, offset, j, visible, TABLE: tl.constexpr):
    """Entries of the rows' directions at keys ``j`` [BN], [BM, BN]; 0 where a key is not ``visible``.

    ``offset`` [BM] are the directions' places in the table.
    """
    return tl.load(table + ((offset[:, None] + j[None, :]) & (TABLE - 1)), mask=visible, other=0.0)
