"""The fused path: every metric of a call in four launches, whatever its length.

``select`` reads K once: softmax statistics and the N largest logits of every row. ``merge`` joins its splits and
gathers the selected token vectors. ``spread`` reads K again and V once for what depends on those: the eigenvalue's
tail, the finite difference, separability and distance. ``finish`` adds each head's rows to the accumulator. Where
no metric needs the second pass it is left out. Launches are boundaries that a program may rely on; a barrier inside
one launch would hang as soon as not all programs are resident.

The partial results between launches are a scratch of at most ``host.SCRATCH_BYTES``, independent of Lk, from
torch's caching allocator. Nothing waits for the device, so a call can be captured into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnmon.metrics import METRICS
from attnmon.stats.directions import TABLE_SIZE, direction_table
from attnmon.stats.fused import host
from attnmon.stats.fused.fields import P_FIELDS, R_FIELDS, S_FIELDS
from attnmon.stats.fused.finish import finish
from attnmon.stats.fused.keys import select, spread
from attnmon.stats.fused.merge import merge
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan, excluded_rows
from attnmon.stats.settings import Settings
from attnmon.stats.visibility import mask_threshold
from attnmon.types import AttentionCall


@torch.no_grad()
def measure(
    call: AttentionCall, settings: Settings, plan: Plan, packing: Packing, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Statistics of one call, packed.

    Args:
        call: one that ``host.unsupported`` has no objection to; nothing of it is kept.
        settings: what to measure.
        plan: which rows.
        packing: layout of the result.
        dtype: ignored: the arithmetic of a row is float32, of sums over rows float64.

    Returns:
        [columns, H], float64; merge with ``Packing.merge``.
    """
    del dtype
    assert call.query is not None
    assert call.key is not None
    device = call.query.device
    result = excluded_rows(plan, packing, call.num_heads, torch.float64)
    sequences = range(*plan.sequences.indices(call.num_sequences))
    reduce_rows(
        result,
        call.query,
        call.key,
        host.tokens_of(call, settings),
        host.row_table(call, plan),
        None if plan.live is None else plan.live.contiguous(),
        call.attn_mask,
        call.key_padding_mask,
        call.sinks,
        direction_table(device),
        call.scale,
        call.softcap or 0.0,
        call.tau,
        settings.fd_epsilon,
        sequences.start,
        sequences.step,
        settings.top_n,
        settings.tokens != "value_raw",
        ",".join(packing.metrics),
    )
    return result


@torch.library.custom_op("attnmon::reduce_rows", mutates_args=("accumulator",))
def reduce_rows(
    accumulator: Tensor,
    query: Tensor,
    key: Tensor,
    tokens: Tensor | None,
    rows: Tensor,
    live: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sinks: Tensor | None,
    table: Tensor,
    scale: float,
    softcap: float,
    tau: float,
    fd_epsilon: float,
    first_sequence: int,
    sequence_step: int,
    top_n: int,
    unit_tokens: bool,
    metrics: str,
) -> None:
    """Adds the sampled rows of a call to ``accumulator``.

    Args:
        accumulator: float64 [columns, H], contiguous, in the layout of ``Packing``.
        query, key: [B, H, Lq, D], [B, Hkv, Lk, D], any strides.
        tokens: [B, Hkv or 1, Lk, E], or None.
        rows: int32 [5, S, R], contiguous, of ``host.row_table``.
        live: bool [S, R], contiguous; None: all rows are.
        attn_mask: [B or 1, H or 1, Lq or 1, Lk], bool (True = visible) or float (added).
        key_padding_mask: [B, Lk], bool (True = padding) or float (added).
        sinks: [H].
        table: ``direction_table`` of the device.
        scale, softcap, tau, fd_epsilon, top_n: as in ``AttentionCall`` and ``Settings``; softcap 0 is none.
        first_sequence, sequence_step: row s of ``rows`` is sequence first_sequence + s * sequence_step.
        unit_tokens: tokens are taken at unit length.
        metrics: the packed metrics' names, joined by commas.
    """
    arguments = (accumulator, query, key, tokens, rows, live, attn_mask, key_padding_mask, sinks, table, scale)
    options = (softcap, tau, fd_epsilon, first_sequence, sequence_step, top_n, unit_tokens, metrics)
    for launch in launches(*arguments, *options):
        launch.kernel[(launch.programs,)](**launch.arguments, **launch.constants, **launch.options)


@reduce_rows.register_fake
def _(accumulator: Tensor, *arguments: object) -> None:
    return None


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: one of the four.
        programs: how many run.
        arguments: tensors and numbers, by the kernel's names for them; what each is, ``_Call.launches`` says.
        constants: what the kernel is specialised to, by name.
        options: warps and stages of the compiler.
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


def launches(
    accumulator: Tensor,
    query: Tensor,
    key: Tensor,
    tokens: Tensor | None,
    rows: Tensor,
    live: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sinks: Tensor | None,
    table: Tensor,
    scale: float,
    softcap: float,
    tau: float,
    fd_epsilon: float,
    first_sequence: int,
    sequence_step: int,
    top_n: int,
    unit_tokens: bool,
    metrics: str,
) -> Iterator[Launch]:
    """The launches that ``reduce_rows`` makes with these arguments, in order."""
    prepared = _Call(query, key, tokens, sinks, softcap, tau, fd_epsilon, top_n, unit_tokens, metrics.split(","))
    num_s, num_r = rows.shape[1:]
    heads = query.shape[1]
    most = max(1, host.SCRATCH_BYTES // prepared.bytes_per_row(num_s * num_r))
    step_s = max(1, min(num_s, most // heads))
    step_r = max(1, min(num_r, most // (heads * step_s)))
    for s in range(0, num_s, step_s):
        for r in range(0, num_r, step_r):
            part = rows[:, s : s + step_s, r : r + step_r]
            yield from prepared.launches(
                accumulator,
                part,
                None if live is None else live[s : s + step_s, r : r + step_r],
                attn_mask,
                key_padding_mask,
                table,
                scale,
                first_sequence + s * sequence_step,
                sequence_step,
            )


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_of(programs: int, num_keys: int, device: torch.device) -> int:
    """Parts that each tile's keys are cut into."""
    return host.choose_splits(programs, num_keys, _processors(device))


class _Call:
    """What all launches of a call have in common."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        tokens: Tensor | None,
        sinks: Tensor | None,
        softcap: float,
        tau: float,
        fd_epsilon: float,
        top_n: int,
        unit_tokens: bool,
        metrics: list[str],
    ) -> None:
        self.query, self.key, self.tokens, self.sinks = query, key, tokens, sinks
        self.softcap, self.tau, self.fd_epsilon, self.top_n = softcap, tau, fd_epsilon, top_n
        packing = Packing(tuple(metrics))
        has = {"": True, "value": tokens is not None, "sinks": sinks is not None, "softcap": softcap > 0}
        names = {*packing.means, *packing.maxima}
        wanted = {name for name in names if has[METRICS[name].needs]}
        self.columns = {
            constant: packing.columns.index(name) if name in wanted else -1 for constant, name in _COLUMNS.items()
        }
        self.group = query.shape[1] // key.shape[1]
        self.kept = max(top_n, host.LEAST_KEPT)
        self.slots = host.power_of_two(self.kept)
        step = fd_epsilon / tau
        self.fd = 0 if "jacobian_fd" not in wanted else 2 if step > host.LARGE_STEP else 1
        self.jacobian = "jacobian" in wanted or "jacobian_max" in wanted
        self.with_tokens = 0
        if tokens is not None and wanted & {"separability", "distance"}:
            self.with_tokens = 1 if unit_tokens else 2
        self.width = 1 if tokens is None or not self.with_tokens else tokens.shape[3]
        # the interpreter multiplies the bit patterns of bfloat16
        self.widen = query.dtype != key.dtype or host.interpreted()

    def _splits(self, num_s: int, num_rows: int) -> int:
        programs = num_s * self.key.shape[1] * -(-num_rows // host.tile_rows(num_rows))
        return splits_of(programs, self.key.shape[2], self.query.device)

    def bytes_per_row(self, rows_of_head: int) -> int:
        """Scratch that a row takes."""
        splits = self._splits(1, rows_of_head * self.group)
        return 4 * _floats_per_row(splits, self.slots, self.width)

    def launches(
        self,
        accumulator: Tensor,
        rows: Tensor,
        live: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        table: Tensor,
        scale: float,
        first_sequence: int,
        sequence_step: int,
    ) -> Iterator[Launch]:
        """The launches for some of the rows."""
        query, key, tokens, sinks = self.query, self.key, self.tokens, self.sinks
        num_s, num_r = rows.shape[1:]
        num_groups, num_keys, head_dim = key.shape[1:]
        num_rows = num_r * self.group
        total = num_s * num_groups * num_rows
        splits = self._splits(num_s, num_rows)
        if tokens is None:
            tokens = key
        x_strides = (tokens.stride(0), tokens.stride(1) if tokens.shape[1] > 1 else 0, *tokens.stride()[2:])
        padding, padding_kind, padding_least = _mask(key_padding_mask)
        mask, mask_kind, mask_least = _mask(attn_mask)
        biased = padding_kind == 2 or mask_kind == 2
        wide = query.dtype == torch.float32 or self.widen
        cut = host.tiles(num_rows, head_dim, self.width, wide, biased and self.fd == 2, self.slots, splits)
        num_tiles = -(-num_rows // cut.BM)
        programs = num_s * num_groups * num_tiles * splits
        scratch = _Scratch(total, splits, self.slots, self.width, query.device)
        padding_strides = (0, 0) if padding is None else padding.stride()
        mask_strides = (0, 0, 0, 0)
        if mask is not None:
            mask_strides = tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True))  # type: ignore[assignment]
        # everything that a kernel may ask for, by the name of its parameter; each gets what it has a parameter for
        given = {
            "q": query,  # [B, H, Lq, D]
            "k": key,  # [B, Hkv, Lk, D]
            "x": tokens,  # [B, Hkv or 1, Lk, E]
            "rows": rows,  # int32 [fields, S, R], see ``host.row_table``
            "live": rows if live is None else live.view(torch.uint8),  # [S, R]
            "padding": rows if padding is None else padding,  # [B, Lk]
            "mask": rows if mask is None else mask,  # [B or 1, H or 1, Lq or 1, Lk]
            "sinks": rows if sinks is None else sinks,  # [H]
            "table": table,  # directions' entries
            "accumulator": accumulator,  # float64 [columns, H]
            **scratch.pieces,
            "scale": scale,
            "softcap": self.softcap,
            "padding_least": padding_least,  # at or below it a float padding mask hides a key
            "mask_least": mask_least,
            "tau": self.tau,
            "epsilon": self.fd_epsilon,
            "step": self.fd_epsilon / self.tau,  # length of the finite difference, in logits
            "first_sequence": first_sequence,  # row s is of sequence first_sequence + s * sequence_step
            "sequence_step": sequence_step,
            "num_rows": num_rows,  # of a sequence and key head: positions x heads of the group
            "num_tiles": num_tiles,  # of BM rows each
            "num_groups": num_groups,  # key heads
            "num_keys": num_keys,
            "num_here": num_s * num_r,  # rows of a head
            "num_total": total,  # rows of all heads
            "num_heads": query.shape[1],
            "row_stride": rows.stride(1),
            "field_stride": rows.stride(0),
            **_strides("q", "bhld", query.stride()),
            **_strides("k", "bhld", key.stride()),
            **_strides("x", "bhld", x_strides),
            **_strides("padding", "bl", padding_strides),
            **_strides("mask", "bhqk", mask_strides),
        }
        flags = {
            "GROUP": self.group, "D": head_dim, "WIDEN": self.widen, "K": self.kept, "KP": self.slots,
            "SPLITS": splits, "PADDING": padding_kind, "MASK": mask_kind, "CAP": self.softcap > 0, "FD": self.fd,
            "TABLE": TABLE_SIZE, "BM": cut.BM, "BN": cut.BN, "BD": cut.BD,
        }  # fmt: skip
        row_flags = {
            "GROUP": self.group, "K": self.kept, "KP": self.slots, "N": self.top_n, "SPLITS": splits,
            "SINK": sinks is not None, "FD": self.fd, "TABLE": TABLE_SIZE, "JACOBIAN": self.jacobian,
            "TOKENS": self.with_tokens, "E": self.width, "BE": cut.BG,
        }  # fmt: skip
        loop = {"num_warps": cut.warps, "num_stages": cut.stages}
        if biased:
            # both passes must round a logit alike: product and bias are not to be fused in one of them alone
            loop["enable_fp_fusion"] = False
        by_row = {"num_warps": cut.row_warps}
        if not host.on_rocm():
            # left alone, ptxas spills a few registers of these to let one block more reside on a multiprocessor
            by_row["maxnreg"] = _ALL_REGISTERS
            ragged = head_dim != host.power_of_two(head_dim)
            if wide or biased or ragged or self.softcap > 0 or self.slots > 32 or self.with_tokens == 2:
                loop["maxnreg"] = _ALL_REGISTERS

        yield Launch(select, programs, _asked_by(select, given), flags, loop)
        yield Launch(merge, -(-total // cut.BR), _asked_by(merge, given), {**row_flags, "BR": cut.BR}, by_row)
        if self.jacobian or self.fd or self.with_tokens:
            terms = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}[tokens.dtype]
            more = {
                "JACOBIAN": self.jacobian,
                "TOKENS": self.with_tokens,
                "E": self.width,
                "TERMS": terms,
                "BE": cut.BE,
            }
            yield Launch(spread, programs, _asked_by(spread, given), {**flags, **more}, loop)
        last = {**row_flags, "LIVE": live is not None, "BR": cut.BF, **self.columns}
        yield Launch(finish, query.shape[1], _asked_by(finish, given), last, by_row)


def _asked_by(kernel: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in kernel.arg_names if name in given}


def _strides(name: str, axes: str, strides: Sequence[int]) -> dict[str, int]:
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


_ALL_REGISTERS = 255  # of a thread of an NVIDIA device

_COLUMNS = {
    "ENTROPY": "entropy", "ENTROPY_NORM": "entropy_norm", "LOGIT_STD": "logit_std", "MAX_PROB": "max_prob",
    "TOP_MASS": "top_mass", "FIRST_MASS": "first_mass", "SINK_MASS": "sink_mass", "SEPARABILITY": "separability",
    "JACOBIAN_MEAN": "jacobian", "JACOBIAN_FD": "jacobian_fd", "DISTANCE": "distance", "MAX_LOGIT": "max_logit",
    "MAX_UNCAPPED": "max_logit_uncapped", "JACOBIAN_MAX": "jacobian_max",
}  # fmt: skip


def _mask(mask: Tensor | None) -> tuple[Tensor | None, int, float]:
    """A mask as the kernels read it, its kind (0 none, 1 bool, 2 float) and the value at or below which it hides."""
    if mask is None:
        return None, 0, 0.0
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), 1, 0.0
    return mask, 2, mask_threshold(mask.dtype)


def _floats_per_row(splits: int, slots: int, width: int) -> int:
    fields = int(S_FIELDS.value), int(P_FIELDS.value), int(R_FIELDS.value)
    return splits * (fields[0] + fields[1] + 1 + 2 * slots) + fields[2] + 4 * slots + width


class _Scratch:
    """Partial results between launches, all in one allocation; every number is written before it is read."""

    def __init__(self, total: int, splits: int, slots: int, width: int, device: torch.device) -> None:
        buffer = torch.empty(total * _floats_per_row(splits, slots, width), dtype=torch.float32, device=device)
        sizes = (
            splits * S_FIELDS.value, splits * slots, splits * slots, R_FIELDS.value, slots, slots, slots, slots, width,
            splits * P_FIELDS.value, splits,
        )  # fmt: skip
        names = (
            "partial_select", "part_z", "part_i", "record", "list_z", "list_i", "near_square", "near_excess",
            "s_vectors", "partial_spread", "nearest",
        )  # fmt: skip
        pieces = dict(zip(names, buffer.split([total * size for size in sizes]), strict=True))
        for name in ("part_i", "list_i", "nearest"):  # indices of keys
            pieces[name] = pieces[name].view(torch.int32)
        self.pieces = pieces
