"""Texts and numbers that several writers share: settings behind a metric, pooled values, tags, short paths."""

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
    """Return the settings that a metric's value depends on, as "N = 16, tokens = value"; "" if there are none."""
    return ", ".join(f"{_SYMBOLS[name]} = {settings.get(name, 'unknown')}" for name in _CHOICES.get(metric, ()))


def unit_label(metric: str) -> str:
    """Return "nats", "logits" or "dimensionless"; "" for a metric that is not in ``METRICS``."""
    info = METRICS.get(metric)
    return "" if info is None else "dimensionless" if info.unit == "1" else info.unit


class Pooled(NamedTuple):
    """Mean, minimum and maximum of a metric over heads, in the units of the metric."""

    mean: float
    min: float
    max: float


def pool(by_path: Mapping[str, FloatArray]) -> Pooled | None:
    """Pool the finite values of all heads, heads weighing alike; None if no head has a finite value."""
    arrays = list(by_path.values())
    if not arrays:
        return None
    values = np.concatenate(arrays).astype(np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    return Pooled(float(values.mean()), float(values.min()), float(values.max()))


def snapshot_scalars(snapshot: Snapshot) -> dict[str, float]:
    """Return tag -> number for loggers of scalars.

    - ``attnmon/<metric>/mean``, ``/min``, ``/max``: see ``pool``; a metric without a finite value has no tags.
    - ``attnmon/rows/total``: rows (query positions, summed over heads) that entered the statistics.
    - ``attnmon/excluded/total``, ``attnmon/excluded/<reason>``: rows left out, all together and by reason.
    """
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
    """Shorten module paths to at most ``limit`` characters each.

    Components that all paths begin with are dropped. In a path that is still too long, long components are cut, but
    never an index, which tells layers apart.
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
