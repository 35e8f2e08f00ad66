"""Patience and hysteresis: from "beyond the limit at this step" to "an alert opens", once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.rules.base import State

Mask = NDArray[np.bool_]
Positions = NDArray[np.intp]

_NOBODY = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Debounce:
    """Opens an alert after ``patience`` measured steps in a row beyond a limit, closes it after ``clear_steps`` in a
    row clear of the lower limit. A step without data neither advances nor resets a count.

    An open alert is not repeated. It may only rise to a higher level, which is one further alert; it stays at that
    level until it closes.

    State: ``run`` int64 [heads, levels], steps beyond each limit; ``calm`` int64 [heads], steps clear while open;
    ``open`` int64 [heads], 0 or the open level (1 = the lowest).
    """

    patience: int
    clear_steps: int
    levels: int = 1

    def new_state(self, num_heads: int) -> State:
        return {
            "run": np.zeros((num_heads, self.levels), dtype=np.int64),
            "calm": np.zeros(num_heads, dtype=np.int64),
            "open": np.zeros(num_heads, dtype=np.int64),
        }

    def step(
        self, state: State, measured: Mask, beyond: Sequence[Mask], clear: Mask, may_open: Mask | None = None
    ) -> tuple[Positions, NDArray[np.int64]]:
        """Advance by one step; the heads whose alert opened or rose, and to which level.

        Args:
            measured: heads with data at this step.
            beyond: per level, lowest first: beyond that level's limit.
            clear: clear of the lower limit; excludes ``beyond``.
            may_open: heads allowed to open now; the others go on counting. None: all.
        """
        run, calm, opened = state["run"], state["calm"], state["open"]
        if not any(mask.any() for mask in beyond) and not run.any() and not opened.any():
            return _NOBODY, _NOBODY.astype(np.int64)  # the usual step: nothing to count
        for level, mask in enumerate(beyond):
            column = run[:, level]
            column += measured & mask
            column[measured & ~mask] = 0
        reached = run >= self.patience
        target = (reached * np.arange(1, self.levels + 1)).max(axis=1)
        rises = measured & (target > opened)
        if may_open is not None:
            rises &= may_open
        if opened.any():
            calm += measured & clear
            calm[(measured & ~clear) | (opened == 0)] = 0
            closing = calm >= self.clear_steps
            opened[closing] = 0
            calm[closing] = 0
        risen = np.flatnonzero(rises)
        opened[risen] = target[risen]
        return risen, target[risen]
