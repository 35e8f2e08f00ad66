"""The starting level of a head: whether it is beyond an absolute limit already when monitoring starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.rules.base import State
from attnmon.rules.debounce import Mask, Positions


@dataclass(frozen=True, slots=True)
class HotStart:
    """Decides from a head's first ``start_steps`` measured steps whether it starts hot.

    A head starts hot if at most one of these steps is within the limit (none, if ``start_steps`` is below three).
    Thus neither one noisy step nor a rise through the limit during these steps makes a head hot. The starting level is
    the median of these steps.

    State: ``start_values`` float32 [heads, start_steps]; ``start_seen`` int64 [heads]; ``start_level`` float64
    [heads], 0 for a head that does not start hot or is not decided.
    """

    start_steps: int

    def new_state(self, num_heads: int) -> State:
        """Return the state of heads without any measured step."""
        return {
            "start_values": np.zeros((num_heads, self.start_steps), dtype=np.float32),
            "start_seen": np.zeros(num_heads, dtype=np.int64),
            "start_level": np.zeros(num_heads),
        }

    def step(self, state: State, measured: Mask, values: NDArray[np.float64], limit: float) -> Positions:
        """Advance ``state`` in place by one step and return the heads whose hot start is decided at this step."""
        seen = state["start_seen"]
        heads = np.flatnonzero(measured & (seen < self.start_steps))
        if heads.size == 0:
            return heads
        state["start_values"][heads, seen[heads]] = values[heads]
        seen[heads] += 1
        decided = heads[seen[heads] == self.start_steps]
        first = state["start_values"][decided]
        hot = (first <= limit).sum(axis=1) <= (1 if self.start_steps >= 3 else 0)
        found: Positions = decided[hot]
        if found.size:
            state["start_level"][found] = np.median(first[hot], axis=1)
        return found

    def decided(self, state: State) -> Mask:
        """Return which heads had all of their first ``start_steps`` steps, [heads]."""
        return state["start_seen"] >= self.start_steps
