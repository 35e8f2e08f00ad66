"""From a metric's values to positions on a color bar, and the bar's ticks."""

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
        lo, hi: ends of the range; lo < hi, and lo > 0 if ``log``.
        log: whether positions follow the logarithm.
        ticks: values to label, within the range, rising.
    """

    lo: float
    hi: float
    log: bool
    ticks: tuple[float, ...]

    def positions(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """0 at ``lo``, 1 at ``hi``; values outside (also infinite ones, and zeros on a logarithmic scale) take the
        nearer end, NaN stays NaN."""
        with np.errstate(divide="ignore", invalid="ignore"):
            clipped = np.clip(values, self.lo, self.hi)
            if self.log:
                return np.asarray(np.log(clipped / self.lo) / math.log(self.hi / self.lo))
            return np.asarray((clipped - self.lo) / (self.hi - self.lo))


def scale_for(metric: str, values: NDArray[np.float64]) -> Scale:
    """The range of a picture of ``values``.

    [0, 1] for metrics with that range, whatever the values, so that pictures of several steps compare. Otherwise
    the finite values' range, widened to round ticks; a logarithmic one spans at most six decades below its top.
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
    """Short and unambiguous: 0.002, 15, 2e+05."""
    return f"{value:.6g}"


def _linear_scale(lo: float, hi: float) -> Scale:
    if hi - lo < 1e-6 * max(abs(lo), abs(hi)):  # one value, or as good as one: give it room on both sides
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
    """The series ... 0.5, 1, 2, 5, 10, 20 ...; index 0 is 1."""
    return _MANTISSAS[index % 3] * 10.0 ** (index // 3)


def _series_floor(value: float) -> int:
    """The index of the last member of the series at or below ``value``, up to rounding."""
    index = 3 * math.floor(math.log10(value)) - 1
    while _series_value(index + 1) <= value * (1 + 1e-6):
        index += 1
    return index


def _series_ceil(value: float) -> int:
    """The index of the first member of the series at or above ``value``, up to rounding."""
    index = _series_floor(value)
    return index if _series_value(index) >= value * (1 - 1e-6) else index + 1
