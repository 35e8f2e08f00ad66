"""Logits that are NaN or infinite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnmon.rules.base import Hit, Rule, State, check_count
from attnmon.rules.debounce import Debounce
from attnmon.rules.heads import Frame


@dataclass(frozen=True, slots=True)
class NonFinite(Rule):
    """A head has rows with a NaN or infinite logit: critical, at once, with no patience.

    It reads the snapshot's counts of excluded rows, no metric. Its alerts have metric "nonfinite_rows", value the
    number of such rows at that step, threshold 0 and no baseline.

    Attributes:
        clear_steps: measured steps in a row without such a row before it can fire again. Default 5.

    Source: trial of 126 runs.
    """

    name: ClassVar[str] = "non_finite"
    metric: ClassVar[str] = "nonfinite_rows"
    metrics: ClassVar[tuple[str, ...]] = ()

    clear_steps: int = 5

    def __post_init__(self) -> None:
        check_count("NonFinite", "clear_steps", self.clear_steps)

    def _gate(self) -> Debounce:
        return Debounce(patience=1, clear_steps=self.clear_steps)

    def new_state(self, num_heads: int) -> State:
        return self._gate().new_state(num_heads)

    def step(self, frame: Frame, state: State) -> list[Hit]:
        counts = frame.excluded("nonfinite")
        if counts is None:
            return []
        beyond = counts > 0
        if not beyond.any() and not state["open"].any():
            return []  # nothing to open, nothing to close
        measured = beyond | (frame.rows() > 0)
        risen, _ = self._gate().step(state, measured, [beyond], ~beyond)
        return [Hit(position, "critical", float(counts[position]), None, 0.0) for position in risen.tolist()]

    def describe(self, hit: Hit) -> str:
        rows = f"{hit.value:.0f} measured row{'' if hit.value == 1 else 's'}"
        return (
            f"{rows} had a NaN or infinite logit. The loss tends to be lost at the same step: stop, go back to the "
            "last good checkpoint, and look for overflow (fp16, softmax scale, masks) at or before this module."
        )
