"""The flat order of heads: the heads of all modules in one array, so that a rule needs no loop over modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.types import Snapshot

FloatVector = NDArray[np.float64]
CountVector = NDArray[np.int64]


class HeadIndex:
    """Which slots of a flat array belong to which module. Modules keep the order in which they were added.

    Attributes:
        slots: module path -> slice of the flat order.
        total: number of heads of all modules together.
    """

    def __init__(self) -> None:
        self.slots: dict[str, slice] = {}
        self.total = 0
        self._module_of: list[tuple[str, int]] = []

    def add(self, path: str, num_heads: int) -> None:
        """Append a module that the index does not contain yet."""
        self.slots[path] = slice(self.total, self.total + num_heads)
        self.total += num_heads
        self._module_of.extend((path, head) for head in range(num_heads))

    def num_heads(self, path: str) -> int:
        """Return the number of heads of a module of the index."""
        slot = self.slots[path]
        return int(slot.stop - slot.start)

    def locate(self, position: int) -> tuple[str, int]:
        """Return the module path and the head within it at a flat position."""
        return self._module_of[position]


class FlatHeads:
    """One snapshot in the flat order of heads: all that a rule sees of a step.

    Attributes:
        step: the optimizer step.
        total: number of heads of all modules together.
    """

    def __init__(self, snapshot: Snapshot, index: HeadIndex) -> None:
        self.step = snapshot.step
        self.total = index.total
        self._snapshot = snapshot
        self._index = index
        self._values: dict[str, FloatVector] = {}

    def metric(self, name: str) -> FloatVector | None:
        """Return a metric as float64 [total], NaN where the snapshot has no number; None if it lacks the metric.

        The array is shared between rules: do not write into it.
        """
        if name in self._values:
            return self._values[name]
        by_path = self._snapshot.values.get(name)
        if by_path is None:
            return None
        values = np.full(self.total, np.nan)
        self._gather(by_path, values)
        self._values[name] = values
        return values

    def rows(self) -> CountVector:
        """Return the counts of rows that entered the statistics, int64 [total]."""
        counts = np.zeros(self.total, dtype=np.int64)
        self._gather(self._snapshot.rows, counts)
        return counts

    def excluded(self, reason: str) -> CountVector | None:
        """Return the counts of rows left out for a reason, int64 [total]; None if the snapshot does not count it."""
        by_path = self._snapshot.excluded_by_reason.get(reason)
        if by_path is None:
            return None
        counts = np.zeros(self.total, dtype=np.int64)
        self._gather(by_path, counts)
        return counts

    def _gather(self, by_path: Mapping[str, NDArray[Any]], out: NDArray[Any]) -> None:
        for path, slot in self._index.slots.items():
            heads = by_path.get(path)
            if heads is not None and len(heads) == slot.stop - slot.start:
                out[slot] = heads
