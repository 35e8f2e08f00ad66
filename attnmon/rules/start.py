"""The starting level of a head: is it beyond an absolute limit already when monitoring starts?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.rules.base import State
from attnmon.rules.debounce import Mask, Positions


@dataclass(frozen=True, slots=True)
class HotStart:
    """Decides from a head's first ``start_steps`` measured steps whether it starts hot.

    It does if at most one of them is within the limit (none, if there are fewer than three), so neither one noisy
    step nor a rise through the limit during these steps decides. Its level is their median.

    State: ``start_values`` float32 [heads, start_steps]; ``start_seen`` int64 [heads]; ``start_level`` float64
    [heads], 0 for a head that does not start hot or is not decided.
    """

    start_steps: int

    def new_state(self, num_heads: int) -> State:
        return {
            "start_values": np.zeros((num_heads, self.start_steps), dtype=np.float32),
            "start_seen": np.zeros(num_heads, dtype=np.int64),
            "start_level": np.zeros(num_heads),
        }

    def step(self, state: State, measured: Mask, values: NDArray[np.float64], limit: float) -> Positions:
        """Take in one step; the heads that are found, at this step, to start hot."""
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
        """Heads whose start is decided."""
        return state["start_seen"] >= self.start_steps
