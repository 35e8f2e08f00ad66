"""Words and pooled numbers that several writers share: the choices behind a number, and one number for all heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attnmon.metrics import METRICS
from attnmon.types import CountArray, FloatArray, Snapshot

# Which settings a metric's value depends on; two values compare only if these agree (definitions.md, section 3).
_CHOICES: dict[str, tuple[str, ...]] = {
    "top_mass": ("top_n",),
    "separability": ("top_n", "tokens"),
    "distance": ("top_n", "tokens"),
    "jacobian_fd": ("fd_epsilon",),
}
_SYMBOLS = {"top_n": "N", "tokens": "tokens", "fd_epsilon": "eps"}


def choices(metric: str, settings: Mapping[str, Any]) -> str:
    """The choices that a metric's value depends on, as "N = 16, tokens = value"; "" if there are none."""
    return ", ".join(f"{_SYMBOLS[name]} = {settings.get(name, 'unknown')}" for name in _CHOICES.get(metric, ()))


def unit_label(metric: str) -> str:
    """ "nats", "logits", "dimensionless"; "" for a metric that is not in the table."""
    info = METRICS.get(metric)
    return "" if info is None else "dimensionless" if info.unit == "1" else info.unit


class Pooled(NamedTuple):
    """Over the heads whose value is finite."""

    mean: float
    min: float
    max: float


def pool(by_path: Mapping[str, FloatArray]) -> Pooled | None:
    """Mean, minimum and maximum over all heads, heads weighing alike; None if no head has a finite value."""
    arrays = list(by_path.values())
    if not arrays:
        return None
    values = np.concatenate(arrays).astype(np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    return Pooled(float(values.mean()), float(values.min()), float(values.max()))


def snapshot_scalars(snapshot: Snapshot) -> dict[str, float]:
    """Tag -> number: mean, minimum and maximum of each metric over heads, and the row counts."""
    scalars: dict[str, float] = {}
    for metric in snapshot.metrics:
        pooled = pool(snapshot[metric])
        if pooled is not None:
            scalars |= {f"attnmon/{metric}/{name}": number for name, number in pooled._asdict().items()}
    scalars["attnmon/rows/total"] = _total(snapshot.rows)
    scalars["attnmon/excluded/total"] = _total(snapshot.excluded)
    for reason, by_path in snapshot.excluded_by_reason.items():
        scalars[f"attnmon/excluded/{reason}"] = _total(by_path)
    return scalars


def _total(by_path: Mapping[str, CountArray]) -> float:
    return float(sum(int(counts.sum()) for counts in by_path.values()))


def short_paths(paths: Sequence[str], limit: int = 26) -> list[str]:
    """Module paths without the components that all of them begin with, at most ``limit`` characters each.

    Too long a path has its long components cut, never an index: that tells layers apart.
    """
    split = [path.split(".") for path in paths]
    shared = max(len(split[0]) - 3, 0) if len(split) == 1 else 0
    while len(split) > 1 and all(len(parts) > shared + 1 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    # "h.3.attn" says more than "3.attn": keep the name in front of an index.
    if shared and any(parts[shared].isdigit() for parts in split):
        shared -= 1
    return [_shorten(parts[shared:], limit) for parts in split]


def _shorten(parts: Sequence[str], limit: int) -> str:
    for most in range(limit, 2, -1):
        short = ".".join(part if part.isdigit() else part[:most] for part in parts)
        if len(short) <= limit:
            return short
    return ".." + short[-(limit - 2) :]
