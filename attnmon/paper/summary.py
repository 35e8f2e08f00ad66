"""From the tables of finished units to what is drawn and quoted: heads merged over chunks, curves over heads, fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.paper.store import Record
from attnmon.theory.critical import critical_n, ks_test

Floats = NDArray[np.float64]

HEAD = ("layer", "module", "head")
_COUNTS = "rows"


def merge_chunks(records: Iterable[Record], keys: Sequence[str]) -> list[Record]:
    """One record a head and setting: means weighted by rows, counts added, maxima taken.

    Args:
        records: of one experiment; columns ending in ``_count`` are counts, in ``_max`` maxima, in ``_least`` minima,
            in ``_se`` standard errors of means; the other numbers are means over ``rows`` rows.
        keys: columns that tell settings and heads apart.

    Returns:
        Records of the same columns but ``chunk``, in the order of their first appearance.
    """
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in keys)].append(record)
    return [_merged(group, keys) for group in groups.values()]


def _merged(group: list[Record], keys: Sequence[str]) -> Record:
    merged: Record = {key: group[0][key] for key in keys}
    weights = np.array([record[_COUNTS] for record in group], dtype=np.float64)
    for name in group[0]:
        if name in merged or name == "chunk":
            continue
        values = np.array([record[name] for record in group], dtype=np.float64)
        if name == _COUNTS or name.endswith("_count"):
            merged[name] = int(values.sum())
            continue
        live = weights > 0
        if not live.any():
            merged[name] = float("nan")
        elif name.endswith("_max"):
            merged[name] = float(values[live].max())
        elif name.endswith("_least"):
            merged[name] = float(values[live].min())
        elif name.endswith("_se"):
            merged[name] = float(np.sqrt(((weights * values)[live] ** 2).sum()) / weights.sum())
        else:
            merged[name] = float(np.average(values[live], weights=weights[live]))
    return merged


@dataclass(frozen=True)
class Curve:
    """A quantity over a setting: mean over heads, and the middle half of them.

    Attributes:
        x: [points], the setting.
        mean, low, high: [points]: mean, first and third quartile over heads.
        heads: [points, heads].
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    heads: Floats


def curve(records: Iterable[Record], x: str, y: str) -> Curve:
    """``y`` over ``x``, from records merged over chunks; heads in the order of the records.

    A head without a row at some point (its window is no wider than N) is NaN there and in no mean; a point at which
    that is so of every head is left out.
    """
    columns: dict[float, list[float]] = defaultdict(list)
    for record in records:
        columns[record[x]].append(record[y])
    points = [point for point in sorted(columns) if np.isfinite(columns[point]).any()]
    heads = np.array([columns[point] for point in points], dtype=np.float64)
    low, high = np.nanquantile(heads, (0.25, 0.75), axis=1)
    return Curve(np.array(points, dtype=np.float64), np.nanmean(heads, axis=1), low, high, heads)


@dataclass(frozen=True)
class Line:
    """y = slope x + intercept by least squares, and the share of the variance it explains."""

    slope: float
    intercept: float
    r_squared: float
    through_origin: float  # slope of y = slope x


def fit_line(x: Floats, y: Floats) -> Line | None:
    """Least squares; None with fewer than two points."""
    if len(x) < 2:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    residual = float(((y - slope * x - intercept) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    return Line(
        float(slope),
        float(intercept),
        1.0 - residual / total if total > 0 else float("nan"),
        float((x * y).sum() / (x * x).sum()),
    )


def separation_tests(records: Iterable[Record], level: float) -> list[Record]:
    """The Kolmogorov-Smirnov test of every length and N of experiment 3.

    Args:
        records: of experiment 3, merged over chunks.
        level: significance level.

    Returns:
        length, top_n, heads, statistic, p_value, separated (0 or 1), critical (1 at the first N that is not separated).
    """
    by_length: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_length[record["length"]].append(record)
    found: list[Record] = []
    for length, group in sorted(by_length.items()):
        distance, expected = curve(group, "top_n", "distance"), curve(group, "top_n", "expected")
        first: int | None = None
        for n, sample, reference in zip(distance.x, distance.heads, expected.heads, strict=True):
            there = np.isfinite(sample)  # heads with a narrow window have no row at a large N
            sample, reference = sample[there], reference[there]
            statistic, p_value = ks_test(sample, reference)
            kept = critical_n([int(n)], sample[None], reference[None], level)
            first = kept if first is None else first
            found.append(
                {
                    "length": length,
                    "top_n": int(n),
                    "heads": len(sample),
                    "statistic": float(statistic),
                    "p_value": float(p_value),
                    "separated": int(kept is None),
                    "critical": int(first is not None and first == kept),
                }
            )
    return found


def critical_points(tests: Iterable[Record]) -> tuple[Floats, Floats, list[int]]:
    """(L, critical N) where there is one, and the lengths at which no N of the list was."""
    lengths: dict[int, float | None] = {}
    for test in tests:
        lengths.setdefault(test["length"], None)
        if test["critical"]:
            lengths[test["length"]] = test["top_n"]
    there = [(length, n) for length, n in lengths.items() if n is not None]
    x, y = (np.array(values, dtype=np.float64) for values in (zip(*there, strict=True) if there else ((), ())))
    return x, y, [length for length, n in lengths.items() if n is None]


def total(records: Iterable[Record], name: str) -> int:
    """Sum of a count over all records."""
    return int(sum(record[name] for record in records))
