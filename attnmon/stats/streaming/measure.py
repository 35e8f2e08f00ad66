"""Every metric of the sampled rows with plain torch operations, on any device.

Rows are handled in blocks of a fixed number of logits (whole rows, as many as fit), so memory is
O(block), whatever Lk and the number of rows; an Lq x Lk tensor is never built. Everything is accumulated in
float32 (or float64, if asked), sums over rows in float64. This file decides what a block reads; ``rows.py``
does its arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmon.flex_mods import score_rows
from attnmon.metrics import METRICS
from attnmon.stats.directions import direction_start, direction_windows
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan, excluded_rows, logit_threshold
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.finite_step import EXPM1_LIMIT
from attnmon.stats.streaming.products import in_dtype, lengths_of, scores
from attnmon.stats.streaming.row_inputs import HIDDEN, RowInputs, RowOutputs, Visible
from attnmon.stats.streaming.scratch import scratch
from attnmon.stats.streaming.softmax_rows import row_metrics
from attnmon.stats.streaming.weight_rows import weight_metrics
from attnmon.stats.visibility import mask_threshold, mod_indices, visible_keys
from attnmon.types import AttentionCall

_BLOCK_CPU = 1 << 20  # logits per block, in three buffers of 4 MiB; small operations cost the same for any block
_BLOCK_OTHER = 1 << 24
_KEY_ALIGNMENT = 16


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
    reducer = _Reducer(call, settings, plan, packing, dtype)
    result = excluded_rows(plan, packing, call.num_heads, reducer.dtype)
    sums, maxima = result[: packing.num_sums], result[packing.num_sums :]
    # autocast would run the products below in half precision
    with torch.autocast(device.type, enabled=False):
        for block in reducer.blocks():
            found, heads = reducer.reduce(block), block.heads
            sums[:, heads] += found[: packing.num_sums]
            maxima[:, heads] = torch.maximum(maxima[:, heads], found[packing.num_sums :])
    return result


@dataclass(frozen=True)
class _Block:
    """Sampled sequences x query heads x sampled positions, and the keys any of these rows can see."""

    sequences: slice
    heads: slice
    rows: slice
    keys: slice

    @property
    def num_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)

    @property
    def key(self) -> tuple[int, int, int, int]:
        return (self.sequences.start, self.sequences.stop, self.rows.start, self.rows.stop)


class _Reducer:
    def __init__(
        self, call: AttentionCall, settings: Settings, plan: Plan, packing: Packing, compute: torch.dtype
    ) -> None:
        self.compute = compute
        self.call, self.settings, self.plan, self.packing = call, settings, plan, packing
        self.on_cpu = plan.positions.device.type == "cpu"
        self.num_keys = call.logits.shape[3] if call.key is None else call.key.shape[2]  # type: ignore[union-attr]
        self.group = 1
        if call.key is not None:
            self.group = call.num_heads // call.key.shape[1]
        if call.logits is not None and call.value is not None:
            self.group = call.num_heads // call.value.shape[1]
        wanted = settings.metrics
        tokens = call.hidden if settings.tokens == "hidden" else call.value
        self.with_geometry = tokens is not None and any(METRICS[name].needs == "value" for name in wanted)
        self.with_fd = "jacobian_fd" in wanted
        self._read: dict[str, tuple[Any, Any]] = {}
        self._clean = True  # no vector of the box at hand holds a NaN or an infinity
        self.dtype = torch.float32 if plan.positions.device.type == "mps" else torch.float64

    def blocks(self) -> Iterator[_Block]:
        """Whole rows, as many as the budget allows; a box of keys and values is read once for all its rows."""
        sequences, all_rows = self.plan.positions.shape
        groups = self.call.num_heads // self.group
        elements = _BLOCK_CPU if self.on_cpu else _BLOCK_OTHER
        # keys are read once or twice, logits some thirty times
        per_group = self.num_keys * max(self.group * all_rows, self.call.head_dim // 4)
        step_groups = min(groups, max(1, elements // per_group))
        step_sequences = min(sequences, max(1, elements // (per_group * groups))) if step_groups == groups else 1
        step_rows = max(1, elements // (self.num_keys * self.group * step_groups * step_sequences))
        for s in range(0, sequences, step_sequences):
            for g in range(0, groups, step_groups):
                box = slice(s, min(s + step_sequences, sequences))
                heads = slice(g * self.group, min(g + step_groups, groups) * self.group)
                for r in range(0, all_rows, step_rows):
                    stop = min(r + step_rows, all_rows)
                    yield _Block(box, heads, slice(r, stop), self._keys_of(r, stop))

    @property
    def _keys_known(self) -> bool:
        """Whether rows may be told fewer keys than all: not where logits decide what is visible, or are used whole."""
        return self.call.logits is None and self.call.score_mod is None and self._moves_by_expm1

    def _keys_of(self, first: int, last: int) -> slice:
        """Keys that rows first ... last - 1 of any sequence can see at most."""
        low, high = 0, self.num_keys
        if self.on_cpu and self._keys_known:
            positions = self.plan.positions[:, first:last] + self.call.causal_offset
            left, right = self.call.window or (None, None)
            if self.call.is_causal:
                right = 0 if right is None else min(right, 0)
            if right is not None:
                high = min(high, int(positions.max()) + right + 1)
            if left is not None:
                low = max(low, int(positions.min()) - left)
        # whole chunks, and never empty
        low = min(max(low, 0), self.num_keys - 1) // _KEY_ALIGNMENT * _KEY_ALIGNMENT
        high = -(-max(high, low + 1) // _KEY_ALIGNMENT) * _KEY_ALIGNMENT
        return slice(low, min(high, self.num_keys))

    # -- what a block reads -------------------------------------------------------------------------------

    def _of_sequences(self, tensor: Tensor, block: _Block) -> Tensor:
        return tensor[self.plan.sequences][block.sequences]

    @property
    def _mask_differs_by_head(self) -> bool:
        mask = self.call.attn_mask
        return self.call.mask_mod_by_head or (mask is not None and mask.shape[1] > 1)

    def _chosen(self, block: _Block) -> slice:
        """The block's sequences as a slice of the call's."""
        span = self.plan.sequences
        first = span.start + block.sequences.start * span.step
        count = block.sequences.stop - block.sequences.start
        return slice(first, first + (count - 1) * span.step + 1, span.step)

    def _visible(self, block: _Block, positions: Tensor) -> Visible | None:
        """Which keys the block's rows see; computed once for all layers that share the plan."""
        per_head = self._mask_differs_by_head
        key = ("visible", self.compute, *block.key)
        if per_head or key not in self.plan.shared:
            visible, bias = visible_keys(self.call, self._chosen(block), positions, block.heads, block.keys)
            found = (
                None if visible is None and bias is None else Visible.of(visible, bias, block.num_keys, self.compute)
            )
            if per_head:
                return found
            self.plan.shared[key] = found
        return self.plan.shared[key]  # type: ignore[no-any-return]

    def _logits(self, block: _Block, positions: Tensor) -> Tensor:
        """[S, H, R, Lk] float32, before softcap, bias and masks (with all of them in the eager route)."""
        call = self.call
        if call.logits is not None:
            return self._given_rows(call.logits, block, positions)
        index = positions[:, None, :, None]
        assert call.query is not None
        assert call.key is not None
        query = self._of_sequences(call.query, block)[:, block.heads]
        index = index.expand(-1, query.shape[1], -1, query.shape[3])
        query = torch.gather(query, 2, index, out=scratch("query", index.shape, query)).to(self.compute)
        query *= call.scale
        keys = self._box("key", call.key, block)[:, :, block.keys]
        num_s, num_g, _, dim = keys.shape
        num_rows = positions.shape[1]
        query = query.view(num_s, num_g, self.group * num_rows, dim)
        out = scratch("logits", (*query.shape[:3], block.num_keys), query)
        return scores(query, keys, out).view(num_s, num_g * self.group, num_rows, block.num_keys)

    def _given_rows(self, tensor: Tensor, block: _Block, positions: Tensor) -> Tensor:
        """The block's rows of logits or weights [B, H, Lq, Lk] that the call came with (or of sampled ones)."""
        if self.plan.gathered:
            return tensor[block.sequences, block.heads, block.rows].to(self.compute)
        rows = self._of_sequences(tensor, block)[:, block.heads]
        index = positions[:, None, :, None]
        return rows.gather(2, index.expand(-1, rows.shape[1], -1, rows.shape[3])).to(self.compute)

    def _given_logits(self, logits: Tensor, block: _Block, positions: Tensor) -> tuple[Tensor, Visible | None]:
        rows = self._given_rows(logits, block, positions)
        z = scratch("logits", rows.shape, rows).copy_(rows)  # overwritten, and perhaps asked for a second time
        mask = ~(z <= logit_threshold(logits.dtype))
        # masked entries are anything from -1e9 to -inf; NaN stays, to be counted
        z = z.clamp_(min=HIDDEN)
        if self.on_cpu and bool(mask.all()):
            return z, None
        return z, Visible.of(mask, None, self.num_keys, self.compute)

    def _modified(
        self, block: _Block, positions: Tensor, z: Tensor, visible: Visible | None
    ) -> tuple[Tensor, Visible | None]:
        """Scores after ``score_mod``; a key whose score it makes as low as a mask is hidden."""
        call = self.call
        assert call.score_mod is not None
        assert call.query is not None
        index = mod_indices(call, self._chosen(block), positions, block.heads, block.keys, every_head=True)
        scores = score_rows(call.score_mod, z, *index)
        shown = ~(scores <= mask_threshold(call.query.dtype))  # NaN stays, to be counted
        z = scores.to(self.compute).clamp(min=HIDDEN)
        mask = None if visible is None else visible.mask
        if self.on_cpu and bool((shown if mask is None else shown | ~mask).all()):
            return z, visible
        bias = None if visible is None else visible.shift
        return z, Visible.of(shown if mask is None else shown & mask, bias, block.num_keys, self.compute)

    def _groups(self, block: _Block) -> slice:
        return slice(block.heads.start // self.group, block.heads.stop // self.group)

    def _box(self, name: str, tensor: Tensor, block: _Block) -> Tensor:
        """A box of keys or values, all positions, in the arithmetic's dtype; kept for its other rows."""
        key = (name, block.sequences.start, block.heads.start)
        if self._read.get(name, (None, None))[0] != key:
            part = self._of_sequences(tensor, block)
            self._read[name] = (key, in_dtype(part[:, self._groups(block)], self.compute))
        box: Tensor = self._read[name][1]
        return box

    def _tokens(self, block: _Block) -> tuple[Tensor | None, Tensor | None]:
        """Vectors [S, Hkv or 1, K, E] and, where x is of unit length, 1 / length [S, Hkv or 1, K].

        1 / length is NaN where the length is not finite.
        """
        if not self.with_geometry:
            return None, None
        if self.settings.tokens == "hidden":
            assert self.call.hidden is not None
            name, vectors = "hidden", in_dtype(self._of_sequences(self.call.hidden, block), self.compute)[:, None]
        else:
            assert self.call.value is not None
            name, vectors = "value", self._box("value", self.call.value, block)
        key = (name, block.sequences.start, block.heads.start)
        if self._read.get("length", (None, None))[0] != key:
            length = lengths_of(vectors)
            inverse = length.reciprocal()
            # of a length that is 0, infinite or NaN this product is NaN
            self._clean = self.on_cpu and math.isfinite(float((length * inverse).sum()))
            if not self._clean:
                inverse = torch.where(length > 0, inverse, 0.0)  # a zero vector stays zero
                inverse = torch.where(length.isfinite(), inverse, math.nan)
                self._clean = not self.on_cpu or bool(length.isfinite().all())
            self._read["length"] = (key, inverse)
        if self.settings.tokens == "value_raw":
            return vectors[:, :, block.keys], None
        return vectors[:, :, block.keys], self._read["length"][1][:, :, block.keys]

    def _perturbation(self, block: _Block, positions: Tensor, visible: Visible | None) -> Tensor:
        """a = eps v / tau, or expm1(a): [S, 1 or H, R, K] float32, v of unit length over the visible keys."""
        shared = self.plan.shared
        key = ("perturbation", self.call.tau, self.settings.fd_epsilon, self.compute, *block.key)
        sharable = self._keys_known and not self._mask_differs_by_head
        if sharable and key in shared:
            return shared[key]  # type: ignore[no-any-return]
        first: Tensor | int = 0
        if self.plan.first_key is not None:
            first = self.plan.first_key[block.sequences, block.rows]
        start = direction_start(positions - first) - first + block.keys.start
        direction = direction_windows(start, block.num_keys)[:, None].to(self.compute)
        seen = direction if visible is None or visible.weight is None else direction * visible.weight
        norm = torch.linalg.vector_norm(seen, dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        step = self.settings.fd_epsilon / self.call.tau
        change: Tensor = seen * (step / norm)
        if self._moves_by_expm1:
            change = torch.expm1(change)
        if sharable:
            shared[key] = change
        return change

    def reduce(self, block: _Block, robust: bool = False) -> Tensor:
        """Packed statistics of a block: float64 [columns, heads of the block].

        ``robust`` costs a few passes more and keeps garbage (NaN, infinities) in masked keys away from the
        rows that do not see them; on a CPU it is chosen only when something turns out not to be finite.
        """
        positions = self.plan.positions[block.sequences, block.rows]
        if self.call.logits is not None:
            z, visible = self._given_logits(self.call.logits, block, positions)
        else:
            z, visible = self._logits(block, positions), self._visible(block, positions)
            if self.call.score_mod is not None:
                z, visible = self._modified(block, positions, z, visible)
        tokens, unit = self._tokens(block)
        robust = robust or not self._clean
        first_key = self.plan.first_key
        if first_key is not None:
            first_key = first_key[block.sequences, block.rows] - block.keys.start
        elif block.keys.start:
            first_key = torch.full_like(positions, -block.keys.start)
        inputs = RowInputs(
            z=z,
            visible=visible,
            tau=self.call.tau,
            softcap=self.call.softcap if self.call.logits is None else None,
            sinks=None if self.call.sinks is None else self.call.sinks[block.heads].to(self.compute),
            tokens=tokens,
            inverse_length=unit,
            perturbation=self._perturbation(block, positions, visible) if self.with_fd else None,
            perturbation_is_expm1=self._moves_by_expm1,
            fd_epsilon=self.settings.fd_epsilon,
            first_key=first_key,
            top_n=self.settings.top_n,
            robust=robust or not self.on_cpu,
        )
        if self.call.weights is not None:
            rows = self._weighted(block, positions, inputs)
        else:
            rows = row_metrics(inputs, self.settings.metrics)
        if self.on_cpu and not inputs.robust and not bool(rows.finite.all()):
            return self.reduce(block, robust=True)
        live = self.plan.live
        if live is not None:
            live = live[block.sequences, None, block.rows]
        return self._pack(rows.values, rows.finite, rows.num_keys, live)

    @property
    def _moves_by_expm1(self) -> bool:
        return self.call.weights is None and self.settings.fd_epsilon / self.call.tau <= EXPM1_LIMIT

    def _weighted(self, block: _Block, positions: Tensor, inputs: RowInputs) -> RowOutputs:
        """Metrics of rows that come with their weights."""
        call, alpha = self.call, self.call.alpha
        assert call.weights is not None
        if isinstance(alpha, Tensor):
            alpha = alpha.to(self.compute)[block.heads if alpha.numel() > 1 else slice(None)][:, None, None]
        weights = self._given_rows(call.weights, block, positions)
        return weight_metrics(inputs, weights, alpha, call.normalizer, self.settings.metrics)

    def _pack(self, values: dict[str, Tensor], finite: Tensor, num_keys: Tensor, live: Tensor | None) -> Tensor:
        """Sum rows [S, H, R] into the packed layout."""
        asked = torch.ones_like(finite) if live is None else live.expand_as(finite)
        seen = asked & (num_keys >= 1)
        valid = seen & finite
        pairs = valid & (num_keys >= 2)
        selections = valid & (num_keys > self.settings.top_n)
        classes = {"any": valid, "pair": pairs, "selection": selections}
        nothing = torch.zeros_like(finite)
        columns: list[Tensor] = [valid, nothing, asked & ~seen, seen & ~finite]
        addends: list[Tensor] = []
        for name in self.packing.means:
            value = values.get(name)
            counted = nothing if value is None else classes[METRICS[name].valid_rows]
            if value is not None and METRICS[name].needs == "value":
                counted = counted & value.isfinite()  # a value vector that is not finite says nothing of the row
            addends.append(torch.zeros_like(valid, dtype=self.compute) if value is None else value)
            columns.append(counted)
        first = self.packing.first_mean
        counts = torch.stack(columns).sum((1, 3), dtype=self.dtype)
        pieces = [counts[:first]]
        if addends:
            sums = torch.where(torch.stack(columns[first:]), torch.stack(addends), 0.0).sum((1, 3), dtype=self.dtype)
            pieces.append(torch.stack([sums, counts[first:]], 1).flatten(0, 1))
        for name in self.packing.maxima:
            value = values.get(name)
            if value is None:
                pieces.append(torch.full_like(counts[:1], -math.inf))
            else:
                counted = classes[METRICS[name].valid_rows]
                pieces.append(torch.where(counted, value, -math.inf).amax((0, 2))[None].to(self.dtype))
        return torch.cat(pieces)
