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
    """Merge records over chunks to one for each head and setting: means weighted by rows, counts added, maxima taken.

    Args:
        records: of one experiment; columns ending in ``_count`` are counts, in ``_max`` maxima, in ``_least`` minima,
            in ``_se`` standard errors of means; the other numbers are means over ``rows`` rows.
        keys: columns that tell settings and heads apart.

    Returns:
        Records of the same columns but ``chunk``, in the order of their first appearance.

    Source: paper, which averages over rows and gives one number for each layer and head; the merging is ours.
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
    """A quantity over a setting, as the mean and the middle half of the heads.

    Attributes:
        x: float64 [points], the setting.
        mean: float64 [points], mean over heads.
        low: float64 [points], first quartile over heads.
        high: float64 [points], third quartile over heads.
        heads: float64 [points, heads], NaN where a head has no row.

    Source: ours.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    heads: Floats


def curve(records: Iterable[Record], x: str, y: str) -> Curve:
    """Collect ``y`` over ``x``, with heads in the order of the records.

    A head without a row at some point (its window is no wider than N) is NaN there and in no mean; a point at which
    no head has a row is left out.

    Args:
        records: merged over chunks.
        x: column of the setting.
        y: column of the quantity.

    Returns:
        The values, and their mean and quartiles over heads.

    Source: ours.
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
    """A line y = slope x + intercept, fitted by least squares.

    Attributes:
        slope: of the line.
        intercept: of the line.
        r_squared: share of the variance that the line explains; NaN where y does not vary.
        through_origin: slope of the fitted y = slope x.

    Source: ours; the paper fits lines in experiments 1 and 3.
    """

    slope: float
    intercept: float
    r_squared: float
    through_origin: float


def fit_line(x: Floats, y: Floats) -> Line | None:
    """Fit a line by least squares.

    Args:
        x: float64 [points].
        y: float64 [points].

    Returns:
        The line, or None with fewer than two points.

    Source: ours.
    """
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
    """Run the Kolmogorov-Smirnov test at every length and N of experiment 3.

    Args:
        records: of experiment 3, merged over chunks.
        level: significance level, in (0, 1).

    Returns:
        Records of length, top_n, heads, statistic, p_value, separated (0 or 1) and critical (1 at the first N that is
        not separated).

    Raises:
        AttnmonError: the level is outside (0, 1).
        MissingExtra: SciPy is absent.

    Source: paper, Algorithm 3.
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
    """Collect the critical N of each length.

    Args:
        tests: what ``separation_tests`` returned.

    Returns:
        L and critical N, float64 [points] each, and the lengths at which no N of the list was critical.

    Source: paper, experiment 3.
    """
    lengths: dict[int, float | None] = {}
    for test in tests:
        lengths.setdefault(test["length"], None)
        if test["critical"]:
            lengths[test["length"]] = test["top_n"]
    there = [(length, n) for length, n in lengths.items() if n is not None]
    x, y = (np.array(values, dtype=np.float64) for values in (zip(*there, strict=True) if there else ((), ())))
    return x, y, [length for length, n in lengths.items() if n is None]


def total(records: Iterable[Record], name: str) -> int:
    """Sum a count over all records.

    Args:
        records: of one experiment.
        name: column of the count.

    Returns:
        The sum.

    Source: ours.
    """
    return int(sum(record[name] for record in records))
