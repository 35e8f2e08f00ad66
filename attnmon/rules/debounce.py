"""Patience and hysteresis: when being beyond a limit opens an alert and when the alert closes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.checks import check_number, check_whole
from attnmon.rules.base import Rule, State

Mask = NDArray[np.bool_]
Positions = NDArray[np.intp]

_NOBODY = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Debounce:
    """Opens and closes the alerts of every head of one rule.

    An alert opens after ``patience`` measured steps in a row beyond a limit. It closes after ``clear_steps`` measured
    steps in a row clear of the lower limit. A step without data neither advances nor resets a count.

    An open alert is not repeated. It may only rise to a higher level, which is one further alert; it stays at that
    level until it closes.

    State: ``run`` int64 [heads, levels], steps beyond each limit; ``calm`` int64 [heads], steps clear while open;
    ``open`` int64 [heads], 0 or the open level (1 = the lowest).

    Attributes:
        patience: in measured steps.
        clear_steps: in measured steps.
        levels: number of limits.
    """

    patience: int
    clear_steps: int
    levels: int = 1

    def new_state(self, num_heads: int) -> State:
        """Return the state of heads without any measured step."""
        return {
            "run": np.zeros((num_heads, self.levels), dtype=np.int64),
            "calm": np.zeros(num_heads, dtype=np.int64),
            "open": np.zeros(num_heads, dtype=np.int64),
        }

    def step(
        self, state: State, measured: Mask, beyond: Sequence[Mask], clear: Mask, may_open: Mask | None = None
    ) -> tuple[Positions, NDArray[np.int64]]:
        """Advance by one step and find the heads whose alert opened or rose.

        Args:
            state: changed in place.
            measured: [heads], heads with data at this step.
            beyond: per level, lowest first, [heads]: beyond that level's limit.
            clear: [heads], clear of the lower limit; excludes ``beyond``.
            may_open: [heads] whose alert may open at this step; the other heads go on counting. None means all.

        Returns:
            Positions of the heads, and the level that each of them reached.
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


@dataclass(frozen=True, kw_only=True)
class DebouncedRule(Rule):
    """Base of rules whose alerts are opened and closed by ``Debounce``.

    Attributes:
        clear_steps: measured steps in a row clear of the limit that close an alert, which can then fire again.
            Default 5.

    Raises:
        AttnmonError: an option is out of range; the message names the rule and the option.
    """

    clear_steps: int = 5

    def __post_init__(self) -> None:
        check_whole(self._option("clear_steps"), self.clear_steps)

    def _option(self, name: str) -> str:
        """Return the name of an option for error messages, such as "Ceiling: warning"."""
        return f"{type(self).__name__}: {name}"

    def _debounce(self) -> Debounce:
        return Debounce(patience=1, clear_steps=self.clear_steps)

    def new_state(self, num_heads: int) -> State:
        return self._debounce().new_state(num_heads)


@dataclass(frozen=True, kw_only=True)
class PatientRule(DebouncedRule):
    """Base of rules that wait for several steps beyond a limit and have a lower limit for closing.

    Attributes:
        patience: measured steps in a row beyond the limit before the rule alarms. Default 5.
        clear_fraction: an alert closes below this fraction of the limit; in (0, 1].
    """

    patience: int = 5
    clear_fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self._option("patience"), self.patience)
        check_number(self._option("clear_fraction"), self.clear_fraction, below=1.0, closed=True)

    def _debounce(self) -> Debounce:
        return Debounce(self.patience, self.clear_steps)
