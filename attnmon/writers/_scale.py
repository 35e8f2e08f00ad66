"""Maps a metric's values to positions on a color bar, and chooses the ticks of the bar."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.metrics import METRICS

_MANTISSAS = (1, 2, 5)
_MOST_DECADES = 6


@dataclass(frozen=True, slots=True)
class Scale:
    """A closed range, linear or logarithmic.

    Attributes:
        lo: lower end of the range; greater than 0 if ``log``.
        hi: upper end of the range; greater than ``lo``.
        log: whether positions follow the logarithm.
        ticks: values to label, within the range, rising.
    """

    lo: float
    hi: float
    log: bool
    ticks: tuple[float, ...]

    def positions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Map values to [0, 1], with 0 at ``lo`` and 1 at ``hi``.

        Values outside of the range (also infinite ones, and zeros on a logarithmic scale) map to the nearer end. NaN
        stays NaN.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            clipped = np.clip(values, self.lo, self.hi)
            if self.log:
                return np.asarray(np.log(clipped / self.lo) / math.log(self.hi / self.lo))
            return np.asarray((clipped - self.lo) / (self.hi - self.lo))


def scale_for(metric: str, values: NDArray[np.float64]) -> Scale:
    """Choose the range of a picture of ``values``.

    A metric with the range [0, 1] always gets that range, so that pictures of several steps compare. For any other
    metric it is the range of the finite values, widened to round ticks. A logarithmic range spans at most six decades.
    """
    info = METRICS.get(metric)
    if info is not None and info.value_range == "[0, 1]":
        return Scale(0.0, 1.0, False, (0.0, 0.25, 0.5, 0.75, 1.0))
    finite = values[np.isfinite(values)]
    if info is not None and info.log_scale:
        positive = finite[finite > 0]
        return _log_scale(float(positive.min()), float(positive.max())) if positive.size else _log_scale(0.1, 1.0)
    return _linear_scale(float(finite.min()), float(finite.max())) if finite.size else _linear_scale(0.0, 1.0)


def format_tick(value: float) -> str:
    """Format a tick's value, such as 0.002, 15, 2e+06."""
    return f"{value:.6g}"


def _linear_scale(lo: float, hi: float) -> Scale:
    if hi - lo < 1e-6 * max(abs(lo), abs(hi)):  # (nearly) a single value: leave room on both sides
        margin = 0.1 * abs(lo)
        lo, hi = lo - margin, hi + margin
    if lo == hi:
        lo, hi = 0.0, 1.0
    rough = (hi - lo) / 4
    decade = 10.0 ** math.floor(math.log10(rough))
    step = min((mantissa * decade for mantissa in (1, 2, 5, 10)), key=lambda candidate: abs(candidate - rough))
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], False, ticks)


def _log_scale(lo: float, hi: float) -> Scale:
    last = _series_ceil(hi)
    first = max(_series_floor(lo), last - 3 * _MOST_DECADES)
    if last - first < 2:  # less than half a decade: the noise would fill the whole color bar
        first, last = first - 1, last + 1
    every = 1 if last - first <= 6 else 3
    ticks = tuple(_series_value(index) for index in range(first, last + 1) if every == 1 or index % 3 == 0)
    return Scale(_series_value(first), _series_value(last), True, ticks)


def _series_value(index: int) -> float:
    """Return a member of the series ... 0.5, 1, 2, 5, 10, 20 ...; index 0 is 1."""
    return _MANTISSAS[index % 3] * 10.0 ** (index // 3)


def _series_floor(value: float) -> int:
    """Return the index of the last member of the series at or below ``value``, up to rounding."""
    index = 3 * math.floor(math.log10(value)) - 1
    while _series_value(index + 1) <= value * (1 + 1e-6):
        index += 1
    return index


def _series_ceil(value: float) -> int:
    """Return the index of the first member of the series at or above ``value``, up to rounding."""
    index = _series_floor(value)
    return index if _series_value(index) >= value * (1 - 1e-6) else index + 1
