"""Which implementation reduces a call: "auto" trusts a GPU's kernels with a kind of call once they were seen to agree.

The first call of each kind is reduced twice, by the kernels and by the streaming implementation, and the two are
compared: once per kind, not once per step, since the comparison waits for the device. Kernels that fail to compile or
to agree on this machine are not used for that kind again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnmon.metrics import METRICS
from attnmon.stats.api import choose_backend, measure
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan
from attnmon.stats.settings import Settings
from attnmon.types import AttentionCall

_TOLERANCE = 1e-3  # relative; both compute in float32, and their rounding differs by far less
_OF_SELECTIONS = 0.05  # of separability and distance, which change where rounding exchanges two nearly equal weights


class BackendChoice:
    """Reduces calls and remembers which kinds of them the kernels may take.

    Args:
        settings, packing: what to measure, and the layout of the results.
        backend: "auto", "torch" or "triton"; an explicit choice is not compared with anything.
        on_note: called with a sentence when "auto" turns away from the kernels.
    """

    def __init__(self, settings: Settings, packing: Packing, backend: str, on_note: Callable[[str], None]) -> None:
        self._settings, self._packing = settings, packing
        self._backend, self._on_note = backend, on_note
        self._trusted: dict[Any, bool] = {}

    def __call__(self, call: AttentionCall, plan: Plan) -> tuple[Tensor, str]:
        """Packed statistics [columns, H] of a call, and the backend that made them: "torch" or "triton".

        Raises:
            AttnmonError: an explicit backend that cannot run here.
            UnsupportedAttention: ``backend="triton"`` and a call that the kernels do not take.
        """
        chosen = choose_backend(self._backend, call, self._settings)
        if chosen == "torch" or self._backend != "auto":
            return self._by(chosen, call, plan), chosen
        kind = _kind(call)
        trusted = self._trusted.get(kind)
        if trusted:
            return self._by("triton", call, plan), "triton"
        plain = self._by("torch", call, plan)
        if trusted is None and not (plain.is_cuda and torch.cuda.is_current_stream_capturing()):
            try:
                fault = disagreement(self._packing, _on_host(self._by("triton", call, plan)), _on_host(plain))
            except Exception as error:
                fault = f"{type(error).__name__}: {error}".splitlines()[0]
            self._trusted[kind] = fault is None
            if fault is not None:
                self._on_note(f"the fused kernels are not used for calls of one kind ({fault}); torch measures them")
        return plain, "torch"

    def _by(self, backend: str, call: AttentionCall, plan: Plan) -> Tensor:
        return measure(call, self._settings, plan, self._packing, backend)


def disagreement(packing: Packing, one: NDArray[np.float64], other: NDArray[np.float64]) -> str | None:
    """How two packed matrices [columns, H] of the same rows differ by more than rounding; None if they do not."""
    for name, left, right in zip(packing.columns, one, other, strict=True):
        metric = METRICS.get(name)
        if metric is None:
            allowed = np.zeros_like(right)
        elif metric.needs == "value":
            allowed = _OF_SELECTIONS * np.abs(right) + _OF_SELECTIONS
        else:
            allowed = _TOLERANCE * np.abs(right) + 1e-6
        with np.errstate(invalid="ignore"):  # a maximum over no row is -inf
            near = np.abs(left - right) <= allowed
        wrong = ~((left == right) | near | (np.isnan(left) & np.isnan(right)))
        if wrong.any():
            head = int(np.argmax(wrong))
            return f"{name} of head {head} was {left[head]:.6g} by the kernels and {right[head]:.6g} without them"
    return None


def _on_host(matrix: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = matrix.double().cpu().numpy()
    return found


def _kind(call: AttentionCall) -> tuple[Any, ...]:
    """What decides which compiled variant takes a call, and how it reads it."""
    tensors = (call.query, call.key, call.value, call.hidden, call.attn_mask, call.key_padding_mask, call.sinks)
    looks = tuple(
        None
        if tensor is None
        else (tensor.dtype, tensor.device, tensor.shape[-1] if tensor.dim() == 4 else 0, tensor.stride(-1) == 1)
        for tensor in tensors
    )
    mask = call.attn_mask
    group = 1 if call.key is None else call.num_heads // call.key.shape[1]
    # lengths by power of two: they decide how many pieces the keys are cut into
    num_keys = 0 if call.key is None else int(math.log2(call.key.shape[2]))
    return (
        looks, None if mask is None else tuple(size == 1 for size in mask.shape), group, num_keys, call.is_causal,
        call.window is not None, call.softcap is not None, call.cu_seqlens is not None, call.tau > 0.1,
    )  # fmt: skip
