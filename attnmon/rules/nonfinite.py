"""A rule for logits that are NaN or infinite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attnmon.rules.base import Hit, State
from attnmon.rules.debounce import DebouncedRule
from attnmon.rules.heads import FlatHeads


@dataclass(frozen=True)
class NonFinite(DebouncedRule):
    """Reports a head that has rows with a NaN or infinite logit: critical, at once, with no patience.

    The rule reads the snapshot's counts of excluded rows and no metric. Its alerts have the metric "nonfinite_rows";
    their value is the number of such rows at that step, their threshold 0, and they have no baseline.

    Its only option, ``clear_steps`` (default 5), counts measured steps in a row without such a row.

    Source: trial of 126 runs.
    """

    name: ClassVar[str] = "non_finite"
    metric: ClassVar[str] = "nonfinite_rows"
    metrics: ClassVar[tuple[str, ...]] = ()

    def step(self, heads: FlatHeads, state: State) -> list[Hit]:
        counts = heads.excluded("nonfinite")
        if counts is None:
            return []
        beyond = counts > 0
        if not beyond.any() and not state["open"].any():
            return []  # nothing to open, nothing to close
        measured = beyond | (heads.rows() > 0)
        risen, _ = self._debounce().step(state, measured, [beyond], ~beyond)
        return [Hit(position, "critical", float(counts[position]), None, 0.0) for position in risen.tolist()]

    def describe(self, hit: Hit) -> str:
        rows = f"{hit.value:.0f} measured row{'' if hit.value == 1 else 's'}"
        return (
            f"{rows} had a NaN or infinite logit. The loss tends to be lost at the same step: stop, go back to the "
            "last good checkpoint, and look for overflow (fp16, softmax scale, masks) at or before this module."
        )
