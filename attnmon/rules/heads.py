"""The flat order of heads: every module's heads side by side, so that a rule works on one array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.types import Snapshot

FloatVector = NDArray[np.float64]
CountVector = NDArray[np.int64]


class HeadIndex:
    """Which slots of a flat array belong to which module. Modules keep the order in which they appeared."""

    def __init__(self) -> None:
        self.slots: dict[str, slice] = {}
        self.total = 0
        self._module_of: list[tuple[str, int]] = []

    def add(self, path: str, num_heads: int) -> None:
        """Append a module that is not in the index."""
        self.slots[path] = slice(self.total, self.total + num_heads)
        self.total += num_heads
        self._module_of.extend((path, head) for head in range(num_heads))

    def num_heads(self, path: str) -> int:
        """Heads of a module of the index."""
        slot = self.slots[path]
        return int(slot.stop - slot.start)

    def locate(self, position: int) -> tuple[str, int]:
        """The module path and head at a flat position."""
        return self._module_of[position]


def count_heads(snapshot: Snapshot, path: str) -> int:
    """Heads of a module in this snapshot; 0 if the snapshot holds nothing about it."""
    rows = snapshot.rows.get(path)
    if rows is not None:
        return len(rows)
    for by_path in snapshot.values.values():
        if path in by_path:
            return len(by_path[path])
    return 0


class Frame:
    """One snapshot in the flat order of heads: what a rule sees of a step.

    Attributes:
        step: the optimizer step.
        total: number of heads, all modules together.
    """

    def __init__(self, snapshot: Snapshot, index: HeadIndex) -> None:
        self.step = snapshot.step
        self.total = index.total
        self._snapshot = snapshot
        self._index = index
        self._values: dict[str, FloatVector] = {}

    def metric(self, name: str) -> FloatVector | None:
        """float64 [total], NaN where the snapshot has no number; None if it lacks the metric altogether.

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
        """int64 [total]: rows that entered the statistics."""
        counts = np.zeros(self.total, dtype=np.int64)
        self._gather(self._snapshot.rows, counts)
        return counts

    def excluded(self, reason: str) -> CountVector | None:
        """int64 [total]: rows left out for this reason; None if the snapshot does not count it."""
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
