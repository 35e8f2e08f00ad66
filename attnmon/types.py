"""Plain data that the parts of the package exchange: attention calls, snapshots, alerts.

Every docstring of the package uses these letters for shapes:

    B    sequences of a call (batch)
    H    query heads; a *head* is always a query head
    Hkv  key/value heads; H is a multiple of Hkv and query head h reads key head h // (H // Hkv)
    Lq   query positions, Lk key positions
    D    head dimension of queries and keys, Dv of values
    S    sampled sequences, R sampled query positions of each
    N    size of the selected key set (``top_n``)

Tensors are always laid out [B, H, L, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float32]
CountArray = NDArray[np.int64]

EXCLUSION_REASONS = ("padding", "masked", "nonfinite")
"""Reasons for leaving out a row: its query is padding, no key is visible, or a visible logit is not finite."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One attention call as the model made it, before anything is sampled or computed.

    Either ``query`` and ``key`` are given, and the logits are recomputed on the sampled rows, or ``logits`` is given:
    the tensor that the model's softmax reads (eager attention), to which scale, softcap, bias and masks are already
    applied.

    Attributes:
        query: [B, H, Lq, D], any float dtype, any strides.
        key: [B, Hkv, Lk, D].
        value: [B, Hkv, Lk, Dv], or None if the route cannot see the values.
        logits: [B, H, Lq, Lk], or None.
        scale: factor by which the call multiplies q.k.
        head_dim: D, which ``query`` cannot tell where it is None.
        attn_mask: broadcastable to [B, H, Lq, Lk]; bool (True = visible) or float (added to the logits; a
            value at or below ``finfo(dtype).min / 2`` masks the key).
        is_causal: query i sees keys j <= i + causal_offset.
        causal_offset: 0 aligns the triangle top-left (PyTorch's SDPA), Lk - Lq bottom-right (flash-attn). A
            window is aligned by the same offset.
        softcap: c in z = c * tanh(scale * q.k / c), before bias and masks.
        sinks: [H] logits of a key-less column that joins the denominator.
        window: (left, right): query i sees keys i + offset - left <= j <= i + offset + right; None on a
            side is no limit there.
        key_padding_mask: [B, Lk] bool, True = padding (as in nn.MultiheadAttention), or float (added).
        cu_seqlens: [documents + 1] int, boundaries of the documents packed into B = 1. A row then sees its own
            document only, and neither ``causal_offset`` nor padding applies.
        hidden: [B, Lk, E] hidden states the keys were made of, for ``tokens="hidden"``.
        is_cross: keys come from another sequence than queries, so that a masked key does not mark the query at
            its position as padding.
        prescale: factor by which the model multiplied q.k before the call (by scaling queries or keys). It is
            already in ``query`` and ``key`` and enters ``tau`` only.
        score_mod: (score, b, h, q, kv) -> score, of flex attention: changes scale * q.k before masks. A score
            as low as that of a masked key hides the key.
        mask_mod: (b, h, q, kv) -> bool, True = visible, of flex attention.
        mask_mod_by_head: the mask function reads its head index.
        positions: [R] int64, the query positions that ``logits`` [B, H, R, Lk] holds; None means all.
        weights: [B, H, Lq, Lk], the result of a normalizer other than softmax on ``logits``; or None.
        normalizer: (logits [..., Lk], alpha) -> weights, the function that made ``weights``; given with them.
        alpha: the normalizer's alpha, as in alpha-entmax (1 for softmax, 2 for sparsemax); a number, or [H] or [1].
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    scale: float
    head_dim: int
    logits: Tensor | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    causal_offset: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    window: tuple[int | None, int | None] | None = None
    key_padding_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    hidden: Tensor | None = None
    is_cross: bool = False
    prescale: float = 1.0
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    mask_mod_by_head: bool = False
    positions: Tensor | None = None
    weights: Tensor | None = None
    normalizer: Callable[[Tensor, float | Tensor], Tensor] | None = None
    alpha: float | Tensor = 1.0

    @property
    def tau(self) -> float:
        """Temperature relative to standard scaled attention: 1 / (scale * sqrt(D))."""
        return 1.0 / (self.scale * self.prescale * math.sqrt(self.head_dim))

    @property
    def num_heads(self) -> int:
        """H, the number of query heads."""
        return int(self._source.shape[1])

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences."""
        return int(self._source.shape[0])

    @property
    def _source(self) -> Tensor:
        source = self.logits if self.query is None else self.query
        assert source is not None
        return source


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The measurements of one optimizer step: one number per head and metric, all micro-batches and ranks merged.

    ``snapshot["entropy_norm"]`` is a dict from module path to a float32 array [heads]. A head without a valid row is
    NaN ("no data"). The dict lacks a module that does not have the metric (``sink_mass`` without a learned sink).

    Attributes:
        step: the optimizer step, counted from 0.
        modules: paths of the measured modules, in the model's order.
        values: metric -> path -> float32 [heads].
        rows: path -> int64 [heads], rows that entered the statistics.
        excluded: path -> int64 [heads], rows left out, all reasons together.
        excluded_by_reason: reason (``EXCLUSION_REASONS``) -> path -> int64 [heads].
        settings: settings that the numbers depend on (``top_n``, ``tokens``, ``fd_epsilon``, ``rows``, ...).
    """

    step: int
    modules: tuple[str, ...]
    values: Mapping[str, Mapping[str, FloatArray]]
    rows: Mapping[str, CountArray]
    excluded: Mapping[str, CountArray]
    excluded_by_reason: Mapping[str, Mapping[str, CountArray]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Mapping[str, FloatArray]:
        try:
            return self.values[metric]
        except KeyError:
            raise KeyError(f"no metric {metric!r} in this snapshot; it has {', '.join(self.values)}") from None

    def __contains__(self, metric: object) -> bool:
        return metric in self.values

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics of this snapshot."""
        return tuple(self.values)

    def num_heads(self, path: str) -> int:
        """Return the number of heads of a module, also of one that lacks some metrics; 0 if nothing is known of it."""
        known: tuple[Mapping[str, Sized], ...] = (self.rows, *self.values.values())
        return next((len(heads[path]) for heads in known if path in heads), 0)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict. A value that is not finite (no data, an infinite temperature) becomes None."""
        return {
            "step": self.step,
            "modules": list(self.modules),
            "values": {
                metric: {path: _json_floats(heads) for path, heads in by_path.items()}
                for metric, by_path in self.values.items()
            },
            "rows": _count_lists(self.rows),
            "excluded": _count_lists(self.excluded),
            "excluded_by_reason": {
                reason: _count_lists(by_path) for reason, by_path in self.excluded_by_reason.items()
            },
            "settings": dict(self.settings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """Build a snapshot from what ``to_dict`` returned; None becomes NaN."""
        return cls(
            step=int(data["step"]),
            modules=tuple(data["modules"]),
            values={
                metric: {path: np.array(heads, dtype=np.float32) for path, heads in by_path.items()}
                for metric, by_path in data["values"].items()
            },
            rows=_count_arrays(data["rows"]),
            excluded=_count_arrays(data["excluded"]),
            excluded_by_reason={
                reason: _count_arrays(by_path) for reason, by_path in data.get("excluded_by_reason", {}).items()
            },
            settings=dict(data.get("settings", {})),
        )


def _count_lists(by_path: Mapping[str, CountArray]) -> dict[str, list[int]]:
    return {path: counts.tolist() for path, counts in by_path.items()}


def _count_arrays(by_path: Mapping[str, list[int]]) -> dict[str, CountArray]:
    return {path: np.array(counts, dtype=np.int64) for path, counts in by_path.items()}


def _json_floats(heads: FloatArray) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in heads]


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule's report that one head left its normal range.

    Attributes:
        step: optimizer step of the snapshot that raised it.
        rule: name of the rule, such as "ceiling".
        severity: "info", "warning" or "critical".
        module: path of the module.
        head: index of the query head within the module.
        metric: the metric that the rule looked at.
        value: the metric's value at ``step``, in the units of the metric.
        baseline: the head's own normal value, in the units of ``value``; None if the rule has none.
        threshold: the limit that ``value`` crossed, in the units of ``value``.
        message: one or two sentences: what was measured, what tends to follow, what to do.
    """

    step: int
    rule: str
    severity: str
    module: str
    head: int
    metric: str
    value: float
    baseline: float | None
    threshold: float
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; numbers that are not finite become None."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("value", "baseline", "threshold"):
            number = data[name]
            data[name] = float(number) if number is not None and math.isfinite(number) else None
        return data
