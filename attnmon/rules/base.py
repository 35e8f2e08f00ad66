"""What every rule is: a frozen configuration, and a step function over a state that somebody else holds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

from numpy.typing import NDArray

from attnmon.errors import AttnmonError
from attnmon.rules.heads import Frame

State = dict[str, NDArray[Any]]
"""State of one rule: named arrays with heads (flat order) on axis 0; never NaN or infinite, so JSON can hold it.

``"open"`` (int64 [heads]: 0 = no open alert, otherwise the level that is open) is always among them.
"""


@dataclass(frozen=True, slots=True)
class Hit:
    """One head that a rule reports; RuleSet makes the Alert of it.

    Attributes:
        position: the head's place in the flat order.
        severity: "info", "warning" or "critical".
        value, baseline, threshold: as in ``Alert``, in the units of the metric.
    """

    position: int
    severity: str
    value: float
    baseline: float | None
    threshold: float


class Rule(ABC):
    """Base of all rules. A subclass is a frozen dataclass whose fields are its parameters.

    Attributes:
        name: key of the rule in alerts and in saved state; unique within a RuleSet.
        metric: what its alerts are about.
        metrics: the snapshot's metrics that it needs. Where one is missing the rule has no data.
    """

    __slots__ = ()

    name: ClassVar[str]
    metric: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    @abstractmethod
    def new_state(self, num_heads: int) -> State:
        """State of heads that were never seen."""

    @abstractmethod
    def step(self, frame: Frame, state: State) -> list[Hit]:
        """Advance ``state`` in place by one snapshot, and report what it shows."""

    @abstractmethod
    def describe(self, hit: Hit) -> str:
        """The alert's text after "head 3 of blocks.0.attn: "; called only for heads that are reported."""


def check_count(rule: str, name: str, value: object, minimum: int = 1) -> None:
    """Raise AttnmonError unless ``value`` is a whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise AttnmonError(f"{rule}: {name} must be a whole number >= {minimum}, not {value!r}")


def check_number(
    rule: str, name: str, value: object, above: float = 0.0, below: float = math.inf, closed: bool = False
) -> None:
    """Raise AttnmonError unless ``value`` is a finite number with above < value < below.

    closed: ``below`` itself is accepted too.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
        if math.isfinite(number) and (above < number < below or (closed and number == below)):
            return
    upper = "" if math.isinf(below) else f" and {'<=' if closed else '<'} {below:g}"
    raise AttnmonError(f"{rule}: {name} must be a finite number > {above:g}{upper}, not {value!r}")


def digits(value: float) -> str:
    """A number for a message: three significant digits, no exponent for ordinary sizes."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.3g}"
