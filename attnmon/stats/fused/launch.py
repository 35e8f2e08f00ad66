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
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from attnmon.metrics import METRICS
from attnmon.stats.directions import TABLE_SIZE, direction_table
from attnmon.stats.fused import host
from attnmon.stats.fused.finish import finish
from attnmon.stats.fused.keys import select, spread
from attnmon.stats.fused.merge import merge
from attnmon.stats.fused.scratch import make_scratch, numbers_per_row
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
    result = excluded_rows(plan, packing, call.num_heads, torch.float64)
    sequences = range(*plan.sequences.indices(call.num_sequences))
    reduce_rows(
        accumulator=result,
        query=call.query,
        key=call.key,
        tokens=host.tokens_of(call, settings),
        rows=host.row_table(call, plan),
        live=None if plan.live is None else plan.live.contiguous(),
        attn_mask=call.attn_mask,
        key_padding_mask=call.key_padding_mask,
        sinks=call.sinks,
        table=direction_table(call.query.device),
        scale=call.scale,
        softcap=call.softcap or 0.0,
        tau=call.tau,
        fd_epsilon=settings.fd_epsilon,
        first_sequence=sequences.start,
        sequence_step=sequences.step,
        top_n=settings.top_n,
        unit_tokens=settings.tokens != "value_raw",
        metrics=",".join(packing.metrics),
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
    planned = CallLaunches(
        accumulator=accumulator,
        query=query,
        key=key,
        tokens=tokens,
        rows=rows,
        live=live,
        attn_mask=attn_mask,
        key_padding_mask=key_padding_mask,
        sinks=sinks,
        table=table,
        scale=scale,
        softcap=softcap,
        tau=tau,
        fd_epsilon=fd_epsilon,
        first_sequence=first_sequence,
        sequence_step=sequence_step,
        top_n=top_n,
        unit_tokens=unit_tokens,
        metrics=metrics,
    )
    for launch in planned.launches():
        launch.kernel[(launch.programs,)](**launch.arguments, **launch.constants, **launch.options)


@reduce_rows.register_fake
def _(accumulator: Tensor, *arguments: object, **named: object) -> None:
    return None


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: one of the four.
        programs: how many run.
        arguments: tensors and numbers, by the kernel's names for them; ``attnmon.stats.fused`` says what each is.
        constants: what the kernel is specialized to, by name.
        options: warps and stages of the compiler.
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class CallLaunches:
    """Works out the launches that ``reduce_rows`` makes of its arguments, which are the attributes."""

    accumulator: Tensor
    query: Tensor
    key: Tensor
    tokens: Tensor | None
    rows: Tensor
    live: Tensor | None
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    sinks: Tensor | None
    table: Tensor
    scale: float
    softcap: float
    tau: float
    fd_epsilon: float
    first_sequence: int
    sequence_step: int
    top_n: int
    unit_tokens: bool
    metrics: str

    def launches(self) -> Iterator[Launch]:
        """The launches in order: those of as many rows as the scratch has room for, then those of the next rows."""
        num_s, num_r = self.rows.shape[1:]
        heads = self.query.shape[1]
        splits = self._splits(1, num_s * num_r * self._group)
        bytes_per_row = 4 * sum(numbers_per_row(splits, self._slots, self._width).values())
        most = max(1, host.SCRATCH_BYTES // bytes_per_row)
        step_s = max(1, min(num_s, most // heads))
        step_r = max(1, min(num_r, most // (heads * step_s)))
        for s in range(0, num_s, step_s):
            for r in range(0, num_r, step_r):
                rows = self.rows[:, s : s + step_s, r : r + step_r]
                live = None if self.live is None else self.live[s : s + step_s, r : r + step_r]
                yield from self._launches_for(rows, live, self.first_sequence + s * self.sequence_step)

    def _launches_for(self, rows: Tensor, live: Tensor | None, first_sequence: int) -> Iterator[Launch]:
        """The launches for some of the rows, the first of which are of the batch's sequence ``first_sequence``."""
        query, key, sinks = self.query, self.key, self.sinks
        num_s, num_r = rows.shape[1:]
        num_groups, num_keys, head_dim = key.shape[1:]
        num_rows = num_r * self._group
        total = num_s * num_groups * num_rows
        splits = self._splits(num_s, num_rows)
        tokens = key if self.tokens is None else self.tokens
        padding, padding_kind, padding_least = _mask(self.key_padding_mask)
        mask, mask_kind, mask_least = _mask(self.attn_mask)
        biased = padding_kind == 2 or mask_kind == 2
        wide = query.dtype == torch.float32 or self._widen
        cut = host.tiles(num_rows, head_dim, self._width, wide, biased and self._step_kind == 2, self._slots, splits)
        num_tiles = -(-num_rows // cut.BM)
        arguments = {
            "q": query,
            "k": key,
            "x": tokens,
            "padding": rows if padding is None else padding,
            "mask": rows if mask is None else mask,
            "sinks": rows if sinks is None else sinks,
            "rows": rows,
            "live": rows if live is None else live.view(torch.uint8),
            "table": self.table,
            "accumulator": self.accumulator,
            **make_scratch(total, splits, self._slots, self._width, query.device),
            "scale": self.scale,
            "softcap": self.softcap,
            "padding_least": padding_least,
            "mask_least": mask_least,
            "tau": self.tau,
            "epsilon": self.fd_epsilon,
            "step": self.fd_epsilon / self.tau,
            "first_sequence": first_sequence,
            "sequence_step": self.sequence_step,
            "num_rows": num_rows,
            "num_tiles": num_tiles,
            "num_groups": num_groups,
            "num_heads": query.shape[1],
            "num_keys": num_keys,
            "num_here": num_s * num_r,
            "num_total": total,
            "row_stride": rows.stride(1),
            "field_stride": rows.stride(0),
            **_strides("q", "bhld", query.stride()),
            **_strides("k", "bhld", key.stride()),
            **_strides("x", "bhld", (tokens.stride(0), _shared(tokens)[1], *tokens.stride()[2:])),
            **_strides("padding", "bl", (0, 0) if padding is None else padding.stride()),
            **_strides("mask", "bhqk", (0, 0, 0, 0) if mask is None else _shared(mask)),
        }
        constants = {
            "GROUP": self._group,
            "D": head_dim,
            "E": self._width,
            "K": self._kept,
            "KP": self._slots,
            "N": self.top_n,
            "SPLITS": splits,
            "PADDING": padding_kind,
            "MASK": mask_kind,
            "CAP": self.softcap > 0,
            "SINK": sinks is not None,
            "LIVE": live is not None,
            "WIDEN": self._widen,
            "FD": self._step_kind,
            "JACOBIAN": self._with_eigenvalue,
            "TOKENS": self._token_kind,
            "TERMS": {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}[tokens.dtype],
            "TABLE": TABLE_SIZE,
            "BM": cut.BM,
            "BN": cut.BN,
            "BD": cut.BD,
            **self._columns,
        }
        over_keys = {"num_warps": cut.warps, "num_stages": cut.stages}
        if biased:
            # both passes must round a logit alike: product and bias are not to be fused in one of them alone
            over_keys["enable_fp_fusion"] = False
        over_rows = {"num_warps": cut.row_warps}
        if not host.on_rocm():
            # left alone, ptxas spills a few registers of these to let one block more reside on a multiprocessor
            over_rows["maxnreg"] = _ALL_REGISTERS
            ragged = head_dim != host.power_of_two(head_dim)
            if wide or biased or ragged or self.softcap > 0 or self._slots > 32 or self._token_kind == 2:
                over_keys["maxnreg"] = _ALL_REGISTERS

        def launch(kernel: Any, programs: int, options: dict[str, int], **sizes: int) -> Launch:
            return Launch(
                kernel, programs, _asked_by(kernel, arguments), _asked_by(kernel, {**constants, **sizes}), options
            )

        tiles = num_s * num_groups * num_tiles * splits
        yield launch(select, tiles, over_keys)
        yield launch(merge, -(-total // cut.BR), over_rows, BE=cut.BG, BR=cut.BR)
        if self._with_eigenvalue or self._step_kind or self._token_kind:
            yield launch(spread, tiles, over_keys, BE=cut.BE)
        yield launch(finish, query.shape[1], over_rows, BE=cut.BG, BR=cut.BF)

    def _splits(self, num_s: int, num_rows: int) -> int:
        """Parts that each tile's keys are cut into, for so many sequences and rows of each and of a key head."""
        programs = num_s * self.key.shape[1] * -(-num_rows // host.tile_rows(num_rows))
        return host.choose_splits(programs, self.key.shape[2], _processors(self.query.device))

    @cached_property
    def _wanted(self) -> set[str]:
        """Metrics with a column that the call has the inputs for."""
        packing = Packing(tuple(self.metrics.split(",")))
        has = {
            "": True,
            "value": self.tokens is not None,
            "sinks": self.sinks is not None,
            "softcap": self.softcap > 0,
        }
        return {name for name in (*packing.means, *packing.maxima) if has[METRICS[name].needs]}

    @cached_property
    def _columns(self) -> dict[str, int]:
        columns = Packing(tuple(self.metrics.split(","))).columns
        return {constant: columns.index(name) if name in self._wanted else -1 for constant, name in COLUMNS.items()}

    @property
    def _group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def _kept(self) -> int:
        return max(self.top_n, host.LEAST_KEPT)

    @property
    def _slots(self) -> int:
        return host.power_of_two(self._kept)

    @property
    def _step_kind(self) -> int:
        if "jacobian_fd" not in self._wanted:
            return 0
        return 2 if self.fd_epsilon / self.tau > host.LARGE_STEP else 1

    @property
    def _with_eigenvalue(self) -> bool:
        return not self._wanted.isdisjoint({"jacobian", "jacobian_max"})

    @property
    def _token_kind(self) -> int:
        if self.tokens is None or self._wanted.isdisjoint({"separability", "distance"}):
            return 0
        return 1 if self.unit_tokens else 2

    @property
    def _width(self) -> int:
        return 1 if self.tokens is None or not self._token_kind else self.tokens.shape[3]

    @property
    def _widen(self) -> bool:
        # the interpreter multiplies the bit patterns of bfloat16
        return self.query.dtype != self.key.dtype or host.interpreted()


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _asked_by(kernel: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the numbers that a kernel has a parameter for; a parameter without one fails when it is launched."""
    return {name: given[name] for name in kernel.arg_names if name in given}


def _strides(name: str, axes: str, strides: Sequence[int]) -> dict[str, int]:
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def _shared(tensor: Tensor) -> list[int]:
    """Strides of a tensor whose axes of one entry stand for all: 0 over those."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


_ALL_REGISTERS = 255  # of a thread of an NVIDIA device

COLUMNS = {
    "ENTROPY": "entropy",
    "ENTROPY_NORM": "entropy_norm",
    "LOGIT_STD": "logit_std",
    "MAX_PROB": "max_prob",
    "TOP_MASS": "top_mass",
    "FIRST_MASS": "first_mass",
    "SINK_MASS": "sink_mass",
    "SEPARABILITY": "separability",
    "JACOBIAN_MEAN": "jacobian",
    "JACOBIAN_FD": "jacobian_fd",
    "DISTANCE": "distance",
    "MAX_LOGIT": "max_logit",
    "MAX_UNCAPPED": "max_logit_uncapped",
    "JACOBIAN_MAX": "jacobian_max",
}
"""Constant of ``finish`` -> metric whose column it is."""


def _mask(mask: Tensor | None) -> tuple[Tensor | None, int, float]:
    """A mask as the kernels read it, its kind (0 none, 1 bool, 2 float) and the value at or below which it hides."""
    if mask is None:
        return None, 0, 0.0
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), 1, 0.0
    return mask, 2, mask_threshold(mask.dtype)
