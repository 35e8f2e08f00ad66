"""Rules with an absolute limit: ceiling of the largest logit, low effective temperature.

Defaults are those of a trial of 126 runs (small pre-LN and post-LN transformers): on the ten healthy runs that were
kept for checking, 125,000 head-steps, the ceiling gave no false alarm and low temperature gave one.

Healthy pretrained heads may sit beyond an absolute limit (a MiniLM head: largest logit 75, effective temperature
0.06). A head that does so in its first measured steps *starts hot*: that is told once, severity "info", and from
then on, for as long as the state lives, its limits are ``hot_factor`` times its own starting level, where that is
further out. Such a note is not an open alert.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from attnmon.errors import AttnmonError
from attnmon.rules.base import Hit, Rule, State, check_count, check_number, digits
from attnmon.rules.debounce import Debounce
from attnmon.rules.heads import FloatVector, Frame
from attnmon.rules.start import HotStart


class LimitRule(Rule):
    """Shared by rules with absolute limits on a *signal*, a number that is larger the worse it is."""

    __slots__ = ()

    severities: ClassVar[tuple[str, ...]]
    patience: int
    clear_fraction: float
    clear_steps: int
    start_steps: int
    hot_factor: float

    @property
    @abstractmethod
    def limits(self) -> tuple[float, ...]:
        """Limits of the signal, lowest first, one for each of ``severities``."""

    @abstractmethod
    def signal(self, values: FloatVector) -> FloatVector:
        """The signal of the metric's values; NaN where there is no data."""

    @abstractmethod
    def value(self, signal: float) -> float:
        """The metric's value of a signal; inverse of ``signal``."""

    def _check_common(self) -> None:
        rule = type(self).__name__
        check_count(rule, "patience", self.patience)
        check_count(rule, "clear_steps", self.clear_steps)
        check_count(rule, "start_steps", self.start_steps)
        check_number(rule, "clear_fraction", self.clear_fraction, below=1.0, closed=True)
        check_number(rule, "hot_factor", self.hot_factor, above=1.0)

    def _gate(self) -> Debounce:
        return Debounce(self.patience, self.clear_steps, len(self.severities))

    def new_state(self, num_heads: int) -> State:
        return {**self._gate().new_state(num_heads), **HotStart(self.start_steps).new_state(num_heads)}

    def step(self, frame: Frame, state: State) -> list[Hit]:
        values = frame.metric(self.metric)
        if values is None:
            return []
        signal = self.signal(values)
        measured = np.isfinite(signal)
        start = HotStart(self.start_steps)
        hits: list[Hit] = []
        for position in start.step(state, measured, signal, self.limits[0]).tolist():
            state["run"][position] = 0  # its limits change here
            level = self.value(float(state["start_level"][position]))
            hits.append(Hit(position, "info", float(values[position]), level, self.value(self.limits[0])))
        limits = self._limits_of_heads(state["start_level"])
        risen, levels = self._gate().step(
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
        """Per level, the limit of every head's signal; a hot head's levels keep their ratio."""
        lowest = self.limits[0]
        scale = np.maximum(start_level * (self.hot_factor / lowest), 1.0)
        return [limit * scale for limit in self.limits]

    def _told_hot(self, hit: Hit, word: str) -> str:
        assert hit.baseline is not None
        level = self.signal(np.array([hit.baseline]))[0]
        further = self.value(max(self.limits[0], float(level) * self.hot_factor))
        return (
            f"starts hot: {self.metric} was {word} {digits(hit.threshold)} in the first {self.start_steps} measured "
            f"steps (median {digits(hit.baseline)}, now {digits(hit.value)}). Some healthy pretrained heads are like "
            f"this and nothing needs doing; it alarms only if it gets {word} {digits(further)}."
        )


@dataclass(frozen=True, slots=True)
class Ceiling(LimitRule):
    """The largest logit of a head is very large.

    Attributes:
        warning: limit of ``max_logit``, in logits. Default 50.
        critical: the second limit, in logits. Default 100. Passing it is one further alert.
        patience: measured steps in a row beyond a limit before it alarms. Default 5.
        clear_fraction: the alert closes below this fraction of the (head's) warning limit ... Default 0.9.
        clear_steps: ... for so many measured steps in a row; then it can fire again. Default 5.
        start_steps: measured steps that decide whether a head starts hot. Default 5.
        hot_factor: a hot head's warning limit is this times its starting level, its critical limit
            ``critical / warning`` times that. Default 1.5.

    Source: trial of 126 runs. 28 to 107 steps ahead of the loss spike on learning-rate ramps; never fired with qk-norm.
    It reads logits after the softcap, so it is idle where a softcap is below the limit.
    """

    name: ClassVar[str] = "ceiling"
    metric: ClassVar[str] = "max_logit"
    metrics: ClassVar[tuple[str, ...]] = ("max_logit",)
    severities: ClassVar[tuple[str, ...]] = ("warning", "critical")

    warning: float = 50.0
    critical: float = 100.0
    patience: int = 5
    clear_fraction: float = 0.9
    clear_steps: int = 5
    start_steps: int = 5
    hot_factor: float = 1.5

    def __post_init__(self) -> None:
        check_number("Ceiling", "warning", self.warning)
        check_number("Ceiling", "critical", self.critical)
        if self.critical <= self.warning:
            raise AttnmonError(
                f"Ceiling: critical must be larger than warning ({self.warning:g}), not {self.critical!r}"
            )
        self._check_common()

    @property
    def limits(self) -> tuple[float, ...]:
        return (float(self.warning), float(self.critical))

    def signal(self, values: FloatVector) -> FloatVector:
        return values

    def value(self, signal: float) -> float:
        return signal

    def describe(self, hit: Hit) -> str:
        if hit.severity == "info":
            return self._told_hot(hit, "above")
        started = "" if hit.baseline is None else f"; it started at {digits(hit.baseline)}"
        return (
            f"max_logit is {digits(hit.value)}, above {digits(hit.threshold)} for {self.patience} measured steps in a "
            f"row{started}. Logits that keep growing often come before a loss spike, though not always: watch the "
            "loss, and if they go on growing lower the learning rate or add qk-norm or a softcap."
        )


@dataclass(frozen=True, slots=True)
class LowTemperature(LimitRule):
    """The logits of a head spread so far that its softmax is close to one-hot. Advisory: "warning" at most.

    Attributes:
        limit: of ``effective_temperature`` (dimensionless). Default 0.1: a logit standard deviation of 10.
        patience: measured steps in a row below the limit before it alarms. Default 5.
        clear_fraction: the alert closes above limit / clear_fraction ... Default 0.9.
        clear_steps: ... for so many measured steps in a row; then it can fire again. Default 5.
        start_steps: measured steps that decide whether a head starts hot. Default 5.
        hot_factor: a hot head alarms below its starting level divided by this. Default 1.5.

    An infinite temperature (all logits equal) is a measurement, and not low.
    Source: trial of 126 runs; the paper's advice to avoid T < 0.1 (arXiv 2508.17821).
    """

    name: ClassVar[str] = "low_temperature"
    metric: ClassVar[str] = "effective_temperature"
    metrics: ClassVar[tuple[str, ...]] = ("effective_temperature",)
    severities: ClassVar[tuple[str, ...]] = ("warning",)

    limit: float = 0.1
    patience: int = 5
    clear_fraction: float = 0.9
    clear_steps: int = 5
    start_steps: int = 5
    hot_factor: float = 1.5

    def __post_init__(self) -> None:
        check_number("LowTemperature", "limit", self.limit)
        self._check_common()

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
            return self._told_hot(hit, "below")
        started = "" if hit.baseline is None else f"; it started at {digits(hit.baseline)}"
        return (
            f"effective_temperature is {digits(hit.value)} (logit standard deviation {digits(1.0 / hit.value)}), below "
            f"{digits(hit.threshold)} for {self.patience} measured steps in a row{started}. Attention this sharp tends "
            "to give vanishing gradients, or very large ones near ties, but healthy heads do it too: look at the loss "
            "and at max_logit before changing anything."
        )
