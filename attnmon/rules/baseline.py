"""A head's own normal level: median and robust spread over a window that ends some steps in the past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.rules.base import State
from attnmon.rules.debounce import Mask


@dataclass(frozen=True, slots=True)
class LaggedWindow:
    """Median and sd = max(1.4826 * MAD, sd_floor) of the ``window`` newest values that are older than ``gap`` values.

    The gap keeps a fault that is just beginning out of the level it is compared with. Windows count accepted values
    of each head, not steps. A head takes window + gap float32 numbers of memory.

    Median and sd are computed anew at every ``refresh``-th accepted value of a head, not at each: they lag by
    ``gap`` anyway, and computing them is most of the cost of a rule.

    State: ``delay`` float32 [heads, gap] and ``window`` float32 [heads, window], rings; ``seen`` int64 [heads],
    accepted values so far; ``median`` and ``sd`` float64 [heads], sd = 0 while there is no baseline yet.

    Attributes:
        window: in values.
        gap: in values.
        min_history: values that the window must contain before there is a baseline.
        sd_floor: least sd, in units of the values.
        refresh: in values.
    """

    window: int
    gap: int
    min_history: int
    sd_floor: float
    refresh: int

    def new_state(self, num_heads: int) -> State:
        """Return the state of heads without any accepted value."""
        return {
            "delay": np.zeros((num_heads, self.gap), dtype=np.float32),
            "window": np.zeros((num_heads, self.window), dtype=np.float32),
            "seen": np.zeros(num_heads, dtype=np.int64),
            "median": np.zeros(num_heads),
            "sd": np.zeros(num_heads),
        }

    def push(self, state: State, values: NDArray[np.float64], accept: Mask) -> None:
        """Add one value of each head of ``accept`` to ``state``, in place; those values must be finite."""
        heads = np.flatnonzero(accept)
        if heads.size == 0:
            return
        delay, window, seen = state["delay"], state["window"], state["seen"]
        count = seen[heads]
        place = count % self.gap
        if int(count.min()) >= self.gap:
            window[heads, (count - self.gap) % self.window] = delay[heads, place]
        else:
            late = count >= self.gap
            window[heads[late], (count[late] - self.gap) % self.window] = delay[heads[late], place[late]]
        delay[heads, place] = values[heads]
        count += 1
        seen[heads] = count
        history = count - self.gap
        due = (history >= self.min_history) & ((count % self.refresh == 0) | (state["sd"][heads] == 0.0))
        if due.any():
            self._refresh(state, heads[due], np.minimum(history[due], self.window))

    def _refresh(self, state: State, heads: NDArray[np.intp], history: NDArray[np.int64]) -> None:
        """Compute median and sd of ``heads``, whose windows are filled in their first ``history`` places."""
        values = state["window"][heads]
        if int(history.min()) < self.window:
            values[np.arange(self.window) >= history[:, None]] = np.inf  # empty places sort behind the filled ones
        median = _medians(values, history)
        spread = _medians(np.abs(values - median[:, None].astype(np.float32)), history)
        state["median"][heads] = median
        state["sd"][heads] = np.maximum(1.4826 * spread, self.sd_floor)


def _medians(values: NDArray[np.float32], history: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the median of the ``history`` smallest values of every row, float64 [rows]."""
    ordered = np.sort(values, axis=1)
    every = np.arange(len(ordered))
    middle: NDArray[np.float64] = ordered[every, (history - 1) // 2].astype(np.float64)
    middle += ordered[every, history // 2]
    return middle / 2.0
