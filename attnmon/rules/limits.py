"""Rules with an absolute limit: ceiling of the largest logit, low effective temperature.

Defaults come from a trial of 126 runs (small pre-LN and post-LN transformers). On the ten healthy runs that were kept
for checking (125,000 head-steps), the ceiling gave no false alarm and low temperature gave one.

Healthy pretrained heads may be beyond an absolute limit (a MiniLM head: largest logit 75, effective temperature
0.06). A head that is beyond it in its first measured steps *starts hot*. The rule reports that once, with severity
"info", which opens no alert. From then on, for as long as the state lives, the head's limits are ``hot_factor`` times
its own starting level wherever that is further out.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from attnmon.checks import check_number, check_whole
from attnmon.errors import AttnmonError
from attnmon.rules.base import Hit, State, digits
from attnmon.rules.debounce import Debounce, PatientRule
from attnmon.rules.heads import FlatHeads, FloatVector
from attnmon.rules.start import HotStart


@dataclass(frozen=True, kw_only=True)
class LimitRule(PatientRule):
    """Base of rules with absolute limits on a *signal*, a number that is larger the worse it is.

    Attributes:
        clear_fraction: an alert closes when the signal is below this fraction of the head's lowest limit. Default 0.9.
        start_steps: measured steps that decide whether a head starts hot. Default 5.
        hot_factor: the lowest limit of a hot head is its starting level times this; higher limits keep their ratio
            to the lowest. Greater than 1. Default 1.5.

    ``patience`` and ``clear_steps`` are documented in ``attnmon.rules.debounce``.
    """

    severities: ClassVar[tuple[str, ...]]
    clear_fraction: float = 0.9
    start_steps: int = 5
    hot_factor: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self._option("start_steps"), self.start_steps)
        check_number(self._option("hot_factor"), self.hot_factor, above=1.0)

    @property
    @abstractmethod
    def limits(self) -> tuple[float, ...]:
        """The limits of the signal, lowest first, one for each of ``severities``."""

    @abstractmethod
    def signal(self, values: FloatVector) -> FloatVector:
        """Convert values of the metric to the signal; NaN where there is no data."""

    @abstractmethod
    def value(self, signal: float) -> float:
        """Convert a signal back to a value of the metric; inverse of ``signal``."""

    def _debounce(self) -> Debounce:
        return Debounce(self.patience, self.clear_steps, len(self.severities))

    def new_state(self, num_heads: int) -> State:
        return {**super().new_state(num_heads), **HotStart(self.start_steps).new_state(num_heads)}

    def step(self, heads: FlatHeads, state: State) -> list[Hit]:
        values = heads.metric(self.metric)
        if values is None:
            return []
        signal = self.signal(values)
        measured = np.isfinite(signal)
        start = HotStart(self.start_steps)
        hits: list[Hit] = []
        for position in start.step(state, measured, signal, self.limits[0]).tolist():
            state["run"][position] = 0  # its limits change at this step
            level = self.value(float(state["start_level"][position]))
            hits.append(Hit(position, "info", float(values[position]), level, self.value(self.limits[0])))
        limits = self._limits_of_heads(state["start_level"])
        risen, levels = self._debounce().step(
            state,
            measured,
            [signal > limit for limit in limits],
            signal < self.clear_fraction * limits[0],
            start.decided(state),
        )
        for position, level in zip(risen.tolist(), levels.tolist(), strict=True):
            hot = float(state["start_level"][position])
            hits.append(
                Hit(
                    position,
                    self.severities[level - 1],
                    float(values[position]),
                    self.value(hot) if hot else None,
                    self.value(float(limits[level - 1][position])),
                )
            )
        return hits

    def _limits_of_heads(self, start_level: NDArray[np.float64]) -> list[FloatVector]:
        """Return, per level, the limit of every head's signal [heads]; the levels of a hot head keep their ratio."""
        lowest = self.limits[0]
        scale = np.maximum(start_level * (self.hot_factor / lowest), 1.0)
        return [limit * scale for limit in self.limits]

    def _hot_start_text(self, hit: Hit, word: str) -> str:
        assert hit.baseline is not None
        level = self.signal(np.array([hit.baseline]))[0]
        further = self.value(max(self.limits[0], float(level) * self.hot_factor))
        return (
            f"starts hot: {self.metric} was {word} {digits(hit.threshold)} in the first {self.start_steps} measured "
            f"steps (median {digits(hit.baseline)}, now {digits(hit.value)}). Some healthy pretrained heads are like "
            f"this and nothing needs doing; it alarms only if it gets {word} {digits(further)}."
        )


@dataclass(frozen=True)
class Ceiling(LimitRule):
    """Reports a head whose largest logit is very large: "warning", then "critical".

    The rule reads logits after the softcap, so it can never fire where the softcap is below its limit.

    Attributes:
        warning: first limit of ``max_logit``, in logits. Default 50.
        critical: second limit, in logits; greater than ``warning``. Passing it is one further alert. Default 100.

    The other options (keywords only) are documented in ``attnmon.rules.limits.LimitRule``.

    Raises:
        AttnmonError: an option is out of range.

    Source: trial of 126 runs. The rule fired 28 to 107 steps ahead of the loss spike on learning-rate ramps, and never
    with qk-norm.
    """

    name: ClassVar[str] = "ceiling"
    metric: ClassVar[str] = "max_logit"
    metrics: ClassVar[tuple[str, ...]] = ("max_logit",)
    severities: ClassVar[tuple[str, ...]] = ("warning", "critical")

    warning: float = 50.0
    critical: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self._option("warning"), self.warning)
        check_number(self._option("critical"), self.critical)
        if self.critical <= self.warning:
            raise AttnmonError(
                f"{self._option('critical')} must be larger than warning ({self.warning:g}); got {self.critical!r}"
            )

    @property
    def limits(self) -> tuple[float, ...]:
        return (float(self.warning), float(self.critical))

    def signal(self, values: FloatVector) -> FloatVector:
        return values

    def value(self, signal: float) -> float:
        return signal

    def describe(self, hit: Hit) -> str:
        if hit.severity == "info":
            return self._hot_start_text(hit, "above")
        started = "" if hit.baseline is None else f"; it started at {digits(hit.baseline)}"
        return (
            f"max_logit is {digits(hit.value)}, above {digits(hit.threshold)} for {self.patience} measured steps in a "
            f"row{started}. Logits that keep growing often come before a loss spike, though not always: watch the "
            "loss, and if they go on growing lower the learning rate or add qk-norm or a softcap."
        )


@dataclass(frozen=True)
class LowTemperature(LimitRule):
    """Reports a head whose logits spread so far that its softmax is close to one-hot. Advisory: "warning" at most.

    The signal is 1 / ``effective_temperature``. An alert therefore closes above ``limit / clear_fraction``, and a hot
    head alarms below its starting level divided by ``hot_factor``. An infinite temperature (all logits equal) counts
    as a measurement that is not low.

    Attributes:
        limit: of ``effective_temperature`` (dimensionless). Default 0.1: a logit standard deviation of 10.

    The other options (keywords only) are documented in ``attnmon.rules.limits.LimitRule``.

    Raises:
        AttnmonError: an option is out of range.

    Source: trial of 126 runs; the advice to avoid T < 0.1 in "Limitations of Normalization in Attention Mechanism"
    (arXiv 2508.17821).
    """

    name: ClassVar[str] = "low_temperature"
    metric: ClassVar[str] = "effective_temperature"
    metrics: ClassVar[tuple[str, ...]] = ("effective_temperature",)
    severities: ClassVar[tuple[str, ...]] = ("warning",)

    limit: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self._option("limit"), self.limit)

    @property
    def limits(self) -> tuple[float, ...]:
        return (1.0 / self.limit,)

    def signal(self, values: FloatVector) -> FloatVector:
        with np.errstate(divide="ignore"):
            return 1.0 / values  # the mean logit_std; a temperature of 0 becomes inf, which is no data

    def value(self, signal: float) -> float:
        return 1.0 / signal

    def describe(self, hit: Hit) -> str:
        if hit.severity == "info":
            return self._hot_start_text(hit, "below")
        started = "" if hit.baseline is None else f"; it started at {digits(hit.baseline)}"
        return (
            f"effective_temperature is {digits(hit.value)} (logit standard deviation {digits(1.0 / hit.value)}), below "
            f"{digits(hit.threshold)} for {self.patience} measured steps in a row{started}. Attention this sharp tends "
            "to give vanishing gradients, or very large ones near ties, but healthy heads do it too: look at the loss "
            "and at max_logit before changing anything."
        )
