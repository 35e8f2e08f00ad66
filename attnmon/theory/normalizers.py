"""Normalizers side by side on the same logits: weights, exact sensitivity, entropy.

Some of what is used in the place of softmax has weights that do not sum to one: ``sums_to_one`` says so, and
``entropy_of`` says what the entropy is then taken of. "The paper" is arXiv 2508.17821.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnmon.checks import check_number
from attnmon.errors import AttnmonError
from attnmon.theory.general_form import General, Normalizer, row_of
from attnmon.theory.jacobian import spectral_norm
from attnmon.theory.lowrank import spectral_norm_low_rank
from attnmon.theory.sparse_normalizers import Entmax, Sparsemax

__all__ = [
    "Entmax",
    "General",
    "Normalizer",
    "ScalableSoftmax",
    "SelfAdjustedSoftmax",
    "Sigmoid",
    "Softmax",
    "SoftmaxWithSink",
    "Sparsemax",
    "compare",
    "default_normalizers",
]

_SHARES = "the shares |alpha| / sum |alpha|"


@dataclass(frozen=True)
class Softmax(Normalizer):
    """The general form with F = exp(l / T); J = (diag p - p p^T) / T has a spectral norm of at most 1/(2T).

    Args:
        temperature: T, > 0, relative to the usual scale.

    Raises:
        AttnmonError: the temperature is out of range.

    Source: paper, section 2; the bound is ours.
    """

    temperature: float = 1.0
    source: ClassVar[str] = "paper, section 2"

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)

    @property
    def label(self) -> str:
        return f"softmax (T = {self.temperature:g})"

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(torch.where(mask, z / self.temperature, -math.inf), -1)

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        return spectral_norm(self._weights(z, mask), self.temperature)

    def _entropy(self, z: Tensor, mask: Tensor) -> Tensor:
        return _softmax_entropy(torch.where(mask, z / self.temperature, -math.inf))


@dataclass(frozen=True)
class SoftmaxWithSink(Normalizer):
    """Softmax with a learned sink, alpha_i = exp(l_i / T) / (exp(sink) + sum_j exp(l_j / T)).

    The sink is one more outcome, never a key: it belongs to the entropy, and the keys lack the weight that it takes.

    Args:
        sink: logit of the sink; 0 gives "softmax off by one".
        temperature: T, > 0, relative to the usual scale.

    Raises:
        AttnmonError: the temperature or the sink is out of range.

    Source: E. Miller, "Attention is off by one" (2023); learned sinks of gpt-oss; the norm is ours.
    """

    sink: float = 0.0
    temperature: float = 1.0
    sums_to_one: ClassVar[bool] = False
    entropy_of: ClassVar[str] = "the weights and the sink's"
    source: ClassVar[str] = "softmax off by one (E. Miller, 2023); learned sinks, gpt-oss"

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        if not math.isfinite(self.sink):
            raise AttnmonError(f"sink must be a finite logit, not {self.sink}")

    @property
    def label(self) -> str:
        return f"softmax with sink (logit {self.sink:g}, T = {self.temperature:g})"

    def max_entropy(self, n: Tensor) -> Tensor:
        """Compute ln(n + 1), since the sink is one more outcome: float [...] -> [...]."""
        return torch.log(n + 1.0)

    def _outcomes(self, z: Tensor, mask: Tensor) -> Tensor:
        keys = torch.where(mask, z / self.temperature, -math.inf)
        return torch.cat([keys, torch.full_like(keys[..., :1], self.sink)], -1)

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(self._outcomes(z, mask), -1)[..., :-1]

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        p = torch.softmax(self._outcomes(z, mask), -1)
        return spectral_norm(p[..., :-1], self.temperature, p[..., -1])

    def _entropy(self, z: Tensor, mask: Tensor) -> Tensor:
        return _softmax_entropy(self._outcomes(z, mask))


@dataclass(frozen=True)
class ScalableSoftmax(Normalizer):
    """softmax(s ln(n) l), n the visible keys of the row.

    J = s ln n (diag p - p p^T) has a norm that may grow as ln n, up to (s / 2) ln n at a tie.

    Args:
        s: > 0; learned per head in its source.

    Raises:
        AttnmonError: ``s`` is out of range.

    Source: Scalable-Softmax, arXiv 2501.19399; the norm is ours.
    """

    s: float = 1.0
    source: ClassVar[str] = "Scalable-Softmax, arXiv 2501.19399"

    def __post_init__(self) -> None:
        check_number("s", self.s)

    @property
    def label(self) -> str:
        return f"scalable softmax (s = {self.s:g})"

    def _factor(self, mask: Tensor) -> Tensor:
        return self.s * torch.log(mask.sum(-1, dtype=torch.float64))

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(torch.where(mask, z * self._factor(mask)[..., None], -math.inf), -1)

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        return spectral_norm(self._weights(z, mask)) * self._factor(mask)

    def _entropy(self, z: Tensor, mask: Tensor) -> Tensor:
        return _softmax_entropy(torch.where(mask, z * self._factor(mask)[..., None], -math.inf))


@dataclass(frozen=True)
class SelfAdjustedSoftmax(Normalizer):
    """SA-softmax: l_i p_i with p = softmax(l), or (l_i - m) / (M - m) p_i with m = min(min l, 0), M = max(max l, 0).

    The weights sum to sum l_i p_i, or to something in [0, 1]: not to one, in either variant. The plain variant's may be
    negative. Where min l or max l is tied the normalized variant has no derivative; the norm is then that of the
    Jacobian that moves the first of the tied keys. The normalized variant is NaN where all logits are 0, which leaves
    0/0.

    Args:
        normalized: the second form.

    Source: Self-Adjust Softmax, arXiv 2502.18277; the norm is ours.
    """

    normalized: bool = False
    sums_to_one: ClassVar[bool] = False
    entropy_of: ClassVar[str] = _SHARES
    source: ClassVar[str] = "Self-Adjust Softmax, arXiv 2502.18277"

    @property
    def label(self) -> str:
        return f"self-adjusted softmax{' (normalized variant)' if self.normalized else ''}"

    def _scaled(self, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute p, m and M."""
        p = torch.softmax(torch.where(mask, z, -math.inf), -1)
        low = torch.where(mask, z, math.inf).amin(-1, keepdim=True).clamp(max=0.0)
        high = torch.where(mask, z, -math.inf).amax(-1, keepdim=True).clamp(min=0.0)
        return p, low, high

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        p, low, high = self._scaled(z, mask)
        return torch.where(mask, (z - low) / (high - low) * p if self.normalized else z * p, 0.0)

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        p, low, high = self._scaled(z, mask)
        z = torch.where(mask, z, 0.0)
        if not self.normalized:  # diag(p) + diag(l) (diag p - p p^T)
            return spectral_norm_low_rank(p * (1.0 + z), (z * p)[..., None], p[..., None])
        span = high - low
        share = torch.where(mask, (z - low) / span, 0.0)
        # m and M follow the least and the largest logit, unless 0 lies beyond them
        at_low = torch.where(mask, z, math.inf).argmin(-1, keepdim=True)
        at_high = torch.where(mask, z, -math.inf).argmax(-1, keepdim=True)
        one_low = torch.zeros_like(z).scatter_(-1, at_low, (low < 0.0).to(z.dtype))
        one_high = torch.zeros_like(z).scatter_(-1, at_high, (high > 0.0).to(z.dtype))
        left = torch.stack([share * p, (1.0 - share) * p / span, share * p / span], -1)
        return spectral_norm_low_rank(p / span + share * p, left, torch.stack([p, one_low, one_high], -1))


@dataclass(frozen=True)
class Sigmoid(Normalizer):
    """sigmoid(l / T + b), key by key, so that nothing is normalized.

    J is diagonal and has the norm max a (1 - a) / T <= 1/(4T).

    Args:
        bias: b; None stands for -ln n, n the visible keys of the row, as the source recommends.
        temperature: T, > 0, relative to the usual scale.

    Raises:
        AttnmonError: the temperature is out of range.

    Source: sigmoid attention, arXiv 2409.04431; the norm is ours.
    """

    bias: float | None = None
    temperature: float = 1.0
    sums_to_one: ClassVar[bool] = False
    entropy_of: ClassVar[str] = _SHARES
    source: ClassVar[str] = "sigmoid attention, arXiv 2409.04431"

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)

    @property
    def label(self) -> str:
        bias = "-ln n" if self.bias is None else f"{self.bias:g}"
        return f"sigmoid (b = {bias}, T = {self.temperature:g})"

    def _moved(self, z: Tensor, mask: Tensor) -> Tensor:
        n = mask.sum(-1, keepdim=True, dtype=torch.float64)
        return torch.where(mask, z / self.temperature + (-torch.log(n) if self.bias is None else self.bias), -math.inf)

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        return torch.sigmoid(self._moved(z, mask))

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        moved = self._moved(z, mask)
        slopes = torch.sigmoid(moved) * torch.sigmoid(-moved)
        return slopes.amax(-1) / self.temperature


def default_normalizers() -> tuple[Normalizer, ...]:
    """Build each normalizer of this module with its default parameters, SA-softmax in both variants.

    Source: the choice is ours.
    """
    return (
        Softmax(),
        SoftmaxWithSink(),
        ScalableSoftmax(),
        Sparsemax(),
        Entmax(),
        SelfAdjustedSoftmax(),
        SelfAdjustedSoftmax(normalized=True),
        Sigmoid(),
    )


def compare(
    logits: Tensor, normalizers: Iterable[Normalizer] | None = None, visible: Tensor | None = None
) -> list[dict[str, Any]]:
    """Measure normalizers side by side on the same rows.

    Args:
        logits: float [..., n], l, finite at visible keys.
        normalizers: what to measure; None: ``default_normalizers()``.
        visible: bool, broadcastable to [..., n]; None: all keys. Every row must see a key.

    Returns:
        Tidy records, one for each normalizer and metric: "normalizer", "sums_to_one", "entropy_of", "metric",
        "value", "rows" (that the value is taken over; rows whose value is not finite are left out). Metrics, means
        over rows unless said: "weight_sum"; "max_weight"; "support", the share of visible keys whose weight is not 0;
        "entropy" in nats; "entropy_norm", over its largest value, rows of two or more keys; "jacobian", exact
        spectral norm; "jacobian_max", its maximum. Without a row the value is NaN.

    Raises:
        AttnmonError: ``logits`` is no float tensor, or ``visible`` does not fit.
        MissingExtra: ``entmax`` is absent and a normalizer needs it.

    Source: ours.
    """
    z, mask = row_of(logits, visible)
    n = mask.sum(-1, dtype=torch.float64)
    records = []
    for normalizer in default_normalizers() if normalizers is None else normalizers:
        weights = normalizer.weights(z, mask)
        entropy, norm = normalizer.entropy(z, mask), normalizer.jacobian_norm(z, mask)
        rows = {
            "weight_sum": weights.sum(-1),
            "max_weight": torch.where(mask, weights, -math.inf).amax(-1),
            "support": (weights != 0.0).sum(-1) / n,
            "entropy": entropy,
            "entropy_norm": torch.where(n >= 2, entropy / normalizer.max_entropy(n), math.nan),
            "jacobian": norm,
            "jacobian_max": norm,
        }
        for metric, values in rows.items():
            finite = values[values.isfinite()]
            merged = finite.amax() if metric == "jacobian_max" and finite.numel() else finite.mean()
            records.append(
                {
                    "normalizer": normalizer.label,
                    "sums_to_one": normalizer.sums_to_one,
                    "entropy_of": normalizer.entropy_of,
                    "metric": metric,
                    "value": float(merged),
                    "rows": finite.numel(),
                }
            )
    return records


def _softmax_entropy(z: Tensor) -> Tensor:
    """Compute the entropy of softmax(z) from terms >= 0 only; -inf is no outcome."""
    top, at = z.max(-1, keepdim=True)
    below = top - z
    w = torch.exp(-below)
    others = w.scatter(-1, at, 0.0).sum(-1)
    return torch.log1p(others) + torch.where(w > 0.0, w * below, 0.0).sum(-1) / (1.0 + others)
