"""What a block of rows reads of its call: logits, visible keys, token vectors and perturbations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnmon.flex_mods import score_rows
from attnmon.metrics import METRICS
from attnmon.stats.directions import direction_start, direction_windows
from attnmon.stats.plan import Plan, logit_threshold
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.blocks import Block, cut
from attnmon.stats.streaming.finite_step import EXPM1_LIMIT
from attnmon.stats.streaming.products import in_dtype, lengths_of, scores
from attnmon.stats.streaming.row_inputs import HIDDEN, RowInputs, Visible
from attnmon.stats.streaming.scratch import scratch
from attnmon.stats.visibility import mask_threshold, mod_indices, visible_keys
from attnmon.types import AttentionCall


class BlockReader:
    """Reads a call block by block; keys and values that follow one another's blocks share are read once.

    Attributes:
        call, settings, plan: what is measured, how, and on which rows.
        compute: dtype of the arithmetic.
        on_cpu: the tensors are on a CPU, where asking for a number costs no wait.
    """

    def __init__(self, call: AttentionCall, settings: Settings, plan: Plan, compute: torch.dtype) -> None:
        self.call, self.settings, self.plan, self.compute = call, settings, plan, compute
        self.on_cpu = plan.positions.device.type == "cpu"
        self._num_keys = call.logits.shape[3] if call.key is None else call.key.shape[2]  # type: ignore[union-attr]
        self._group = 1
        if call.key is not None:
            self._group = call.num_heads // call.key.shape[1]
        if call.logits is not None and call.value is not None:
            self._group = call.num_heads // call.value.shape[1]
        tokens = call.hidden if settings.tokens == "hidden" else call.value
        self._with_geometry = tokens is not None and any(METRICS[name].needs == "value" for name in settings.metrics)
        self._read: dict[str, tuple[Any, Any]] = {}
        self._clean = True  # no vector of the box at hand holds a NaN or an infinity

    def blocks(self) -> Iterator[Block]:
        """The blocks of the call's sampled rows, in the order in which they are best read."""
        return cut(
            self.call,
            self.plan,
            num_keys=self._num_keys,
            group=self._group,
            on_cpu=self.on_cpu,
            range_known=self._keys_known,
        )

    def inputs(self, block: Block, *, robust: bool) -> RowInputs:
        """The block's rows, as the arithmetic takes them.

        Args:
            block: one of ``blocks``.
            robust: garbage (NaN, infinities) in masked keys is kept away from rows that do not see them, at the price
                of a few passes more. A block that needs it is read so in any case, where that is known.
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
        return RowInputs(
            z=z,
            visible=visible,
            tau=self.call.tau,
            softcap=self.call.softcap if self.call.logits is None else None,
            sinks=None if self.call.sinks is None else self.call.sinks[block.heads].to(self.compute),
            tokens=tokens,
            inverse_length=unit,
            perturbation=self._perturbation(block, positions, visible) if self._with_step else None,
            perturbation_is_expm1=self._moves_by_expm1,
            fd_epsilon=self.settings.fd_epsilon,
            first_key=first_key,
            top_n=self.settings.top_n,
            robust=robust or not self.on_cpu,
        )

    def weights(self, block: Block) -> tuple[Tensor, float | Tensor]:
        """Weights [S, H, R, Lk] of the block's rows, which the call came with, and the normalizer's alpha.

        alpha is a number, or broadcastable to the weights.
        """
        call, alpha = self.call, self.call.alpha
        assert call.weights is not None
        if isinstance(alpha, Tensor):
            alpha = alpha.to(self.compute)[block.heads if alpha.numel() > 1 else slice(None)][:, None, None]
        positions = self.plan.positions[block.sequences, block.rows]
        return self._given_rows(call.weights, block, positions), alpha

    @property
    def _with_step(self) -> bool:
        return "jacobian_fd" in self.settings.metrics

    @property
    def _moves_by_expm1(self) -> bool:
        return self.call.weights is None and self.settings.fd_epsilon / self.call.tau <= EXPM1_LIMIT

    @property
    def _keys_known(self) -> bool:
        """Whether rows may be told fewer keys than all: not where logits decide what is visible, or are used whole."""
        return self.call.logits is None and self.call.score_mod is None and self._moves_by_expm1

    def _of_sequences(self, tensor: Tensor, block: Block) -> Tensor:
        return tensor[self.plan.sequences][block.sequences]

    @property
    def _mask_differs_by_head(self) -> bool:
        mask = self.call.attn_mask
        return self.call.mask_mod_by_head or (mask is not None and mask.shape[1] > 1)

    def _chosen(self, block: Block) -> slice:
        """The block's sequences as a slice of the call's."""
        span = self.plan.sequences
        first = span.start + block.sequences.start * span.step
        count = block.sequences.stop - block.sequences.start
        return slice(first, first + (count - 1) * span.step + 1, span.step)

    def _visible(self, block: Block, positions: Tensor) -> Visible | None:
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

    def _logits(self, block: Block, positions: Tensor) -> Tensor:
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
        query = query.view(num_s, num_g, self._group * num_rows, dim)
        out = scratch("logits", (*query.shape[:3], block.num_keys), query)
        return scores(query, keys, out).view(num_s, num_g * self._group, num_rows, block.num_keys)

    def _given_rows(self, tensor: Tensor, block: Block, positions: Tensor) -> Tensor:
        """The block's rows of logits or weights [B, H, Lq, Lk] that the call came with (or of sampled ones)."""
        if self.plan.gathered:
            return tensor[block.sequences, block.heads, block.rows].to(self.compute)
        rows = self._of_sequences(tensor, block)[:, block.heads]
        index = positions[:, None, :, None]
        return rows.gather(2, index.expand(-1, rows.shape[1], -1, rows.shape[3])).to(self.compute)

    def _given_logits(self, logits: Tensor, block: Block, positions: Tensor) -> tuple[Tensor, Visible | None]:
        rows = self._given_rows(logits, block, positions)
        z = scratch("logits", rows.shape, rows).copy_(rows)  # overwritten, and perhaps asked for a second time
        mask = ~(z <= logit_threshold(logits.dtype))
        # masked entries are anything from -1e9 to -inf; NaN stays, to be counted
        z = z.clamp_(min=HIDDEN)
        if self.on_cpu and bool(mask.all()):
            return z, None
        return z, Visible.of(mask, None, self._num_keys, self.compute)

    def _modified(
        self, block: Block, positions: Tensor, z: Tensor, visible: Visible | None
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

    def _groups(self, block: Block) -> slice:
        return slice(block.heads.start // self._group, block.heads.stop // self._group)

    def _box(self, name: str, tensor: Tensor, block: Block) -> Tensor:
        """A box of keys or values, all positions, in the arithmetic's dtype; kept for its other rows."""
        key = (name, block.sequences.start, block.heads.start)
        if self._read.get(name, (None, None))[0] != key:
            part = self._of_sequences(tensor, block)
            self._read[name] = (key, in_dtype(part[:, self._groups(block)], self.compute))
        box: Tensor = self._read[name][1]
        return box

    def _tokens(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        """Vectors [S, Hkv or 1, K, E] and, where x is of unit length, 1 / length [S, Hkv or 1, K].

        1 / length is NaN where the length is not finite.
        """
        if not self._with_geometry:
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

    def _perturbation(self, block: Block, positions: Tensor, visible: Visible | None) -> Tensor:
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
