"""Statistics by four Triton kernels per call.

``launch.py`` passes every argument of a kernel by name. The names mean the same in all four kernels, and are these
(R: rows of a sequence and key head, that is sampled positions x query heads of the group; T: all rows of a launch;
"field" and "column": see ``fields.py``; the remaining letters: see ``attnmon.types``).

Tensors of the call, of any strides unless said:
    q, k        [B, H, Lq, D], [B, Hkv, Lk, D]
    x           [B, Hkv or 1, Lk, E], token vectors; the keys where no metric reads tokens
    padding     [B, Lk], uint8 (1 = padding) or float (added to logits)
    mask        [B or 1, H or 1, Lq or 1, Lk], uint8 (1 = visible) or float (added to logits)
    sinks       [H], logits of learned sinks
    rows        int32 [fields T_, sampled sequences, sampled positions], of ``host.row_table``
    live        uint8 [sampled sequences, sampled positions], 1 where the row is to be measured
    table       float32 [TABLE], entries of the directions
    accumulator float64 [columns, H], contiguous; the result
    Where a call lacks one of padding, mask, sinks and live, ``rows`` stands in for it and is not read.

Partial results, contiguous; those of keys' indices are int32, all others float32:
    partial_select  [SPLITS, fields S_, T]
    part_z, part_i  [T, SPLITS, KP], each split's K largest logits and their keys, in any order
    record          [fields R_, T]
    list_z, list_i  [T, KP], each row's K largest logits, descending, and their keys
    near_square     [T, KP], squared distances of the K largest keys to s
    near_excess     [T, KP], the same distances' excess over |s|^2
    s_vectors       [T, E], s
    partial_spread  [SPLITS, fields P_, T]
    nearest         [SPLITS, T], of the keys beyond the K largest the one with the least excess

Numbers:
    scale, softcap              z = softcap tanh(scale q.k / softcap); softcap is not read without CAP
    padding_least, mask_least   a float mask hides a key at or below this value
    tau, epsilon                temperature, and step of the finite difference in standard scaled logits
    step                        epsilon / tau, the length of the step in logits
    first_sequence,
    sequence_step               sampled sequence s is sequence first_sequence + s * sequence_step of the batch
    num_rows                    R
    num_tiles                   tiles of BM rows that R rows make
    num_groups, num_heads       Hkv and H
    num_keys                    Lk
    num_here                    rows of one query head: sampled sequences x sampled positions
    num_total                   T
    row_stride, field_stride    of ``rows``, over sequences and over fields; ``live`` has the same row_stride
    <tensor>_stride_<axis>      of q, k and x over b, h, l and d; of padding over b and l; of mask over b, h, q and k;
                                0 over an axis of one entry that stands for all (in x over heads, in mask everywhere)

Constants, to which a kernel is specialized:
    GROUP           H / Hkv
    D, E            widths of q and k, and of x (1 without TOKENS)
    K, KP           logits that are kept of each row, and their slots: the next power of two
    N               size of the selected set
    SPLITS          parts that the keys of each tile are cut into
    PADDING, MASK   0 none, 1 bool, 2 float
    CAP, SINK, LIVE whether the call has a softcap, sinks, and rows that are not live
    WIDEN           whether 16-bit numbers are multiplied as float32
    FD              finite difference: 0 none, 1 a step, 2 a step that may overflow exp
    JACOBIAN        whether the eigenvalue is asked for
    TOKENS          0 no metric reads tokens, 1 at unit length, 2 as they are
    TERMS           16-bit numbers that an entry of s is taken apart into (1: none)
    TABLE           entries of ``table``, a power of two
    BM, BN          rows of a tile and keys of a block
    BD, BE          chunks of D and E
    BR              rows that a program of ``merge``, or an iteration of ``finish``, takes at a time
    ENTROPY, ...    column of the accumulator for the metric (``launch.COLUMNS``); -1 where it is not asked for
"""
