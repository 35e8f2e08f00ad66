"""What one optimizer step has shown so far: reduces each call at once and keeps one small matrix per module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnmon.capture.below import DRY_RUN
from attnmon.capture.coverage import Site
from attnmon.errors import AttnmonError
from attnmon.run.backend_choice import BackendChoice
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan, choose_sequences, make_plan
from attnmon.stats.settings import Settings
from attnmon.types import AttentionCall


@dataclass(slots=True)
class _Sampled:
    """Rows of a softmax whose values have not appeared yet."""

    call: AttentionCall
    plan: Plan


_PLANS_KEPT = 4  # a model has few kinds of calls; each kept plan holds its mask alive


class Accumulator:
    """The recorder's observer.

    Args:
        settings: what to measure.
        backend: "auto", "torch" or "triton".
        on_fault: called with a site's path, the error, and whether it is new at that site.
        on_note: called with a sentence that the user should read once.
    """

    def __init__(
        self,
        settings: Settings,
        backend: str,
        on_fault: Callable[[str, Exception, bool], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.packing = Packing(settings.metrics)
        self._reduce = BackendChoice(settings, self.packing, backend, on_note)
        self._on_fault = on_fault
        self._matrices: dict[str, Tensor] = {}
        # the masks stay referenced, or another mask could come to lie at the same address
        self._plans: dict[Any, tuple[Plan, tuple[Any, ...]]] = {}
        self.next_draw = 1  # where the next step's sampling goes on; part of a monitor's saved state
        self._calls: Counter[str] = Counter()

    @property
    def calls(self) -> int:
        """Attention calls measured in this step."""
        return self._calls.total()

    def begin(self) -> None:
        """A measured step starts."""
        self._calls.clear()
        self._matrices = {}
        self._plans.clear()

    def take(self) -> dict[str, Tensor]:
        """The step's matrices [columns, heads] by path; the accumulator is empty afterwards.

        The next step will look at other positions.
        """
        self.next_draw += max(self._calls.values(), default=0)
        self._calls.clear()
        taken, self._matrices = self._matrices, {}
        self._plans.clear()
        return taken

    # -- the recorder's Observer ----------------------------------------------------------------------------

    def observe(self, site: Site, call: AttentionCall) -> None:
        """Reduce a call into its module's matrix."""
        with torch.no_grad():
            self._add(site, call, self._plan(site, call))

    def sample_sequences(self, site: Site, batch: int) -> slice:
        """The sequences that a call's plan samples."""
        return choose_sequences(batch, self.settings, self._draw(site))

    def sample(self, site: Site, call: AttentionCall) -> _Sampled:
        """Copy the sampled rows of an eager softmax's logits; the L x L tensor itself is let go."""
        assert call.logits is not None
        with torch.no_grad():
            plan = make_plan(call, self.settings, self._draw(site))
            index = plan.positions[:, None, :, None]

            def rows_of(tensor: Tensor) -> Tensor:
                chosen = tensor[plan.sequences]
                return chosen.gather(2, index.expand(-1, chosen.shape[1], -1, chosen.shape[3]))

            weights = None if call.weights is None else rows_of(call.weights)
            sampled = replace(call, logits=rows_of(call.logits), weights=weights)
            if call.positions is not None:
                plan.positions = call.positions[plan.positions]
            plan.gathered = True
            return _Sampled(sampled, plan)

    def complete(self, site: Site, token: Any, value: Tensor | None) -> None:
        """Reduce a sampled call, with its values if they were seen."""
        sampled: _Sampled = token
        call = sampled.call
        assert call.logits is not None
        with torch.no_grad():
            if value is not None:
                value = _as_values(value.detach(), call.logits)
            self._add(site, replace(call, value=value), sampled.plan)

    def fault(self, site: Site, error: Exception) -> None:
        """Count a call that was not measured; that of a dry run is no news."""
        reason = str(error) if isinstance(error, AttnmonError) else f"{type(error).__name__}: {error}"
        is_new = site.refuse(reason.splitlines()[0] if reason else type(error).__name__)
        if reason != DRY_RUN:
            self._on_fault(site.path, error, is_new)

    # -- inside ---------------------------------------------------------------------------------------------

    def _add(self, site: Site, call: AttentionCall, plan: Plan) -> None:
        if site.heads is not None and site.heads != call.num_heads:
            raise AttnmonError(f"the module's calls have different head counts: {site.heads}, then {call.num_heads}")
        packed, site.backend = self._reduce(call, plan)
        site.heads = call.num_heads
        site.calls += 1
        self._calls[site.path] += 1
        matrix = self._matrices.get(site.path)
        if matrix is None:
            self._matrices[site.path] = packed
            return
        # not in place: a first call under inference_mode leaves a matrix that may not be written to
        sums, packed = self.packing.num_sums, packed.to(matrix.device)
        merged = (matrix[:sums] + packed[:sums], torch.maximum(matrix[sums:], packed[sums:]))
        self._matrices[site.path] = torch.cat(merged)

    def _draw(self, site: Site) -> int:
        # micro-batches and repeated calls of a step look at other positions than its first call
        return self.next_draw + self._calls[site.path]

    def _plan(self, site: Site, call: AttentionCall) -> Plan:
        """One plan for all calls of a step that look alike: layers share masks."""
        assert call.query is not None
        assert call.key is not None
        draw, mask, padding = self._draw(site), call.attn_mask, call.key_padding_mask
        masks = [tensor for tensor in (mask, padding) if tensor is not None]
        if call.cu_seqlens is not None or any(tensor.is_inference() for tensor in masks):
            return make_plan(call, self.settings, draw)
        key = (
            draw, call.query.shape[0], call.query.shape[2], call.key.shape[2], call.query.device, call.is_causal,
            call.causal_offset, call.window, call.is_cross, _identity(mask), _identity(padding), id(call.mask_mod),
        )  # fmt: skip
        if key not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = (make_plan(call, self.settings, draw), (mask, padding, call.mask_mod))
        return self._plans[key][0]


def _identity(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype)


def _as_values(value: Tensor, logits: Tensor) -> Tensor | None:
    """Values [B, Hkv, Lk, Dv] that fit sampled logits [S, H, R, Lk], or None."""
    if value.dim() != 4 or value.shape[2] != logits.shape[3] or logits.shape[1] % value.shape[1]:
        return None
    return value
