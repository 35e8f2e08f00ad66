"""How per-head numbers travel: one matrix [columns, heads] that merges by sum and maximum.

The layout depends on the requested metrics alone, never on what a call happened to have, so that micro-
batches, modules and ranks always agree on it. Each mean carries its own count of rows: a merged value is the
value over all rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from attnmon.metrics import METRICS
from attnmon.types import EXCLUSION_REASONS, CountArray, FloatArray


@dataclass(frozen=True)
class Packing:
    """Layout of a packed matrix for one choice of metrics.

    Rows of the matrix, in order: valid rows; excluded rows by reason; (sum, count) of each mean metric;
    then the maxima, which start at -inf.
    """

    metrics: tuple[str, ...]

    @cached_property
    def means(self) -> tuple[str, ...]:
        """Metrics stored as sum and count; includes those that an "inverse_mean" reads."""
        wanted = {METRICS[name].of or name for name in self.metrics if METRICS[name].merge != "max"}
        return tuple(name for name in METRICS if name in wanted)

    @cached_property
    def maxima(self) -> tuple[str, ...]:
        """Metrics stored as a maximum."""
        return tuple(name for name in self.metrics if METRICS[name].merge == "max")

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """What each row of the matrix holds: a metric's name is its sum or maximum, "rows of" it the sum's count."""
        sums = (column for name in self.means for column in (name, f"rows of {name}"))
        return ("rows", *(f"{reason} rows" for reason in EXCLUSION_REASONS), *sums, *self.maxima)

    @property
    def num_sums(self) -> int:
        """Leading columns that merge by addition."""
        return 1 + len(EXCLUSION_REASONS) + 2 * len(self.means)

    @property
    def num_columns(self) -> int:
        """Columns in all: those that merge by addition, then the maxima."""
        return self.num_sums + len(self.maxima)

    @property
    def first_mean(self) -> int:
        """Column of the first mean metric's sum."""
        return 1 + len(EXCLUSION_REASONS)

    def merge(self, matrices: NDArray[np.float64]) -> NDArray[np.float64]:
        """Merge the packed matrices of several calls, modules or ranks.

        Args:
            matrices: [pieces, columns, heads].

        Returns:
            [columns, heads].
        """
        return np.concatenate([matrices[:, : self.num_sums].sum(0), matrices[:, self.num_sums :].max(0)])

    def values(self, matrix: NDArray[np.float64]) -> dict[str, FloatArray]:
        """Each requested metric per head.

        Args:
            matrix: [columns, heads].

        Returns:
            metric -> float32 [heads]; NaN where no row was valid.
        """
        result: dict[str, FloatArray] = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for name in self.metrics:
                metric = METRICS[name]
                if metric.merge == "max":
                    column = matrix[self.num_sums + self.maxima.index(name)]
                    head_values = np.where(np.isneginf(column), np.nan, column)
                else:
                    index = self.first_mean + 2 * self.means.index(metric.of or name)
                    head_values = matrix[index] / matrix[index + 1]
                    if metric.merge == "inverse_mean":
                        head_values = 1.0 / head_values
                result[name] = head_values.astype(np.float32)
        return result

    def rows(self, matrix: NDArray[np.float64]) -> CountArray:
        """Valid rows per head, int64 [heads], of a matrix [columns, heads]."""
        counts: CountArray = matrix[0].astype(np.int64)
        return counts

    def excluded(self, matrix: NDArray[np.float64]) -> Mapping[str, CountArray]:
        """Reason -> rows excluded for it per head, int64 [heads], of a matrix [columns, heads]."""
        return {reason: matrix[1 + index].astype(np.int64) for index, reason in enumerate(EXCLUSION_REASONS)}
