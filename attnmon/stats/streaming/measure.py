"""Every metric of the sampled rows with plain torch operations, on any device.

Rows are handled in blocks (``blocks.py``), so that memory is that of a block, whatever Lk and the number of rows; an
Lq x Lk tensor is never built. ``block_reader.py`` reads a block of the call, ``softmax_rows.py`` and ``weight_rows.py``
do its arithmetic, in float32 (or float64, if asked), and this file sums its rows in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmon.metrics import METRICS
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan, excluded_rows
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.block_reader import BlockReader
from attnmon.stats.streaming.blocks import Block
from attnmon.stats.streaming.row_inputs import RowOutputs
from attnmon.stats.streaming.softmax_rows import row_metrics
from attnmon.stats.streaming.weight_rows import weight_metrics
from attnmon.types import AttentionCall


@torch.no_grad()
def measure(
    call: AttentionCall, settings: Settings, plan: Plan, packing: Packing, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Statistics of one call, packed.

    Args:
        call: tensors on one device; nothing of it is kept.
        settings: what to measure.
        plan: which rows.
        packing: layout of the result.
        dtype: of the arithmetic: float32 while training, float64 where exactness matters more than time.

    Returns:
        [columns, H], float64 (float32 where the device has no float64); merge with ``Packing.merge``.
    """
    source = call.query if call.query is not None else call.logits
    assert source is not None
    device = source.device
    measurement = _CallMeasurement(BlockReader(call, settings, plan, dtype), packing)
    result = excluded_rows(plan, packing, call.num_heads, measurement.sum_dtype)
    sums, maxima = result[: packing.num_sums], result[packing.num_sums :]
    # autocast would run the products below in half precision
    with torch.autocast(device.type, enabled=False):
        for block in measurement.reader.blocks():
            found, heads = measurement.packed(block), block.heads
            sums[:, heads] += found[: packing.num_sums]
            maxima[:, heads] = torch.maximum(maxima[:, heads], found[packing.num_sums :])
    return result


class _CallMeasurement:
    """Measures the blocks that a reader reads, and packs what it finds."""

    def __init__(self, reader: BlockReader, packing: Packing) -> None:
        self.reader, self.packing = reader, packing
        self.sum_dtype = torch.float32 if reader.plan.positions.device.type == "mps" else torch.float64

    def packed(self, block: Block, robust: bool = False) -> Tensor:
        """Packed statistics of a block: [columns, heads of the block], in ``sum_dtype``.

        Args:
            block: the rows.
            robust: as of ``BlockReader.inputs``; on a CPU it is chosen only when something turns out not to be finite.
        """
        reader, call, settings = self.reader, self.reader.call, self.reader.settings
        inputs = reader.inputs(block, robust=robust)
        if call.weights is not None:
            rows = weight_metrics(inputs, *reader.weights(block), call.normalizer, settings.metrics)
        else:
            rows = row_metrics(inputs, settings.metrics)
        if reader.on_cpu and not inputs.robust and not bool(rows.finite.all()):
            return self.packed(block, robust=True)
        live = reader.plan.live
        if live is not None:
            live = live[block.sequences, None, block.rows]
        return self._pack(rows, live)

    def _pack(self, rows: RowOutputs, live: Tensor | None) -> Tensor:
        """Sum rows [S, H, R] into the packed layout."""
        values, finite = rows.values, rows.finite
        asked = torch.ones_like(finite) if live is None else live.expand_as(finite)
        seen = asked & (rows.num_keys >= 1)
        valid = seen & finite
        pairs = valid & (rows.num_keys >= 2)
        selections = valid & (rows.num_keys > self.reader.settings.top_n)
        classes = {"any": valid, "pair": pairs, "selection": selections}
        nothing = torch.zeros_like(finite)
        columns: list[Tensor] = [valid, nothing, asked & ~seen, seen & ~finite]
        addends: list[Tensor] = []
        for name in self.packing.means:
            value = values.get(name)
            counted = nothing if value is None else classes[METRICS[name].valid_rows]
            if value is not None and METRICS[name].needs == "value":
                counted = counted & value.isfinite()  # a value vector that is not finite says nothing of the row
            addends.append(torch.zeros_like(valid, dtype=self.reader.compute) if value is None else value)
            columns.append(counted)
        first = self.packing.first_mean
        counts = torch.stack(columns).sum((1, 3), dtype=self.sum_dtype)
        pieces = [counts[:first]]
        if addends:
            sums = torch.where(torch.stack(columns[first:]), torch.stack(addends), 0.0).sum(
                (1, 3), dtype=self.sum_dtype
            )
            pieces.append(torch.stack([sums, counts[first:]], 1).flatten(0, 1))
        for name in self.packing.maxima:
            value = values.get(name)
            if value is None:
                pieces.append(torch.full_like(counts[:1], -math.inf))
            else:
                counted = classes[METRICS[name].valid_rows]
                pieces.append(torch.where(counted, value, -math.inf).amax((0, 2))[None].to(self.sum_dtype))
        return torch.cat(pieces)
