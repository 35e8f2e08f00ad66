"""The base of every rule: a frozen configuration, and a step function over a state that the RuleSet holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from attnmon.rules.heads import FlatHeads

State = dict[str, NDArray[Any]]
"""State of one rule: named arrays with heads (flat order) on axis 0; never NaN or infinite, so JSON can hold it.

Every state contains ``"open"``, int64 [heads]: 0 where no alert is open, otherwise the level that is open.
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """One head that a rule reports; RuleSet turns it into an Alert.

    Attributes:
        position: index of the head in the flat order.
        severity: "info", "warning" or "critical".
        value: the metric's value at this step, in the units of the metric.
        baseline: the head's own normal value in the same units; None if the rule has none.
        threshold: the limit that ``value`` crossed, in the same units.
    """

    position: int
    severity: str
    value: float
    baseline: float | None
    threshold: float


class Rule(ABC):
    """Base of all rules. A subclass is a frozen dataclass whose fields are its options.

    Attributes:
        name: key of the rule in alerts and in saved state; unique within a RuleSet.
        metric: the metric that its alerts name.
        metrics: metrics that a snapshot must contain for the rule to have data.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    @abstractmethod
    def new_state(self, num_heads: int) -> State:
        """Return the state of ``num_heads`` heads that no step has shown yet."""

    @abstractmethod
    def step(self, heads: FlatHeads, state: State) -> list[Hit]:
        """Advance ``state`` in place by one snapshot and return the heads to report."""

    @abstractmethod
    def describe(self, hit: Hit) -> str:
        """Return the alert's text after "head 3 of blocks.0.attn: "; called only for heads that are reported."""


def digits(value: float) -> str:
    """Format a number for a message: three significant digits, or all digits of numbers from 1,000 to ten million."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.3g}"
