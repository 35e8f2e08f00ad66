"""Rules relative to the head's own normal level: growth of the largest logit, attention becoming uniform.

Both compare a transformed metric x with a lagged window of the head's own past: z = (x - median) / sd, sd = 1.4826 *
MAD of the window, at least ``sd_floor``. Windows count measured steps. Defaults are those of a trial of 126 runs: on
the ten healthy runs kept for checking, 125,000 head-steps, growth gave no false alarm, uniform four (all in one run).
A lagged window is blind to slow ramps, and to runs that are bad from the start.

While an alert is open only every ``relearn_every``-th value of that head enters its window: a fault does not become
the new normal quickly, and a lasting change does in the end. With the defaults growth accepts a new level after about
1,200 measured steps, uniform after about 1,000; the alert then closes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attnmon.errors import AttnmonError
from attnmon.rules.base import Hit, Rule, State, check_count, check_number, digits
from attnmon.rules.baseline import LaggedWindow
from attnmon.rules.debounce import Debounce, Mask
from attnmon.rules.heads import FloatVector, Frame


class RelativeRule(Rule):
    """Shared by rules that compare a head with its own lagged window. State adds ``open_steps`` int64 [heads]."""

    __slots__ = ()

    limit: float
    patience: int
    clear_fraction: float
    clear_steps: int
    warmup_steps: int
    window: int
    gap: int
    min_history: int | None
    sd_floor: float
    refresh_every: int
    relearn_every: int

    @abstractmethod
    def transform(self, values: FloatVector) -> FloatVector:
        """x of the metric's values; not finite where there is no data."""

    @abstractmethod
    def value(self, x: float) -> float:
        """The metric's value of an x."""

    def enters_baseline(self, x: FloatVector) -> Mask:
        """Which values say something of a head's normal level."""
        return np.ones(x.shape, dtype=np.bool_)

    def _check_common(self) -> None:
        rule = type(self).__name__
        check_number(rule, "limit", self.limit)
        check_number(rule, "sd_floor", self.sd_floor)
        check_number(rule, "clear_fraction", self.clear_fraction, below=1.0, closed=True)
        if self.min_history is not None:
            check_count(rule, "min_history", self.min_history, minimum=2)
        check_count(rule, "warmup_steps", self.warmup_steps, minimum=0)
        for name in ("patience", "clear_steps", "window", "gap", "refresh_every", "relearn_every"):
            check_count(rule, name, getattr(self, name))
        if self.min_history is not None and self.min_history > self.window:
            raise AttnmonError(f"{rule}: min_history must be at most window ({self.window}), not {self.min_history!r}")

    def _gate(self) -> Debounce:
        return Debounce(self.patience, self.clear_steps)

    def _baseline(self) -> LaggedWindow:
        return LaggedWindow(self.window, self.gap, self.min_history or self.window, self.sd_floor, self.refresh_every)

    def new_state(self, num_heads: int) -> State:
        return {
            **self._gate().new_state(num_heads),
            **self._baseline().new_state(num_heads),
            "open_steps": np.zeros(num_heads, dtype=np.int64),
        }

    def step(self, frame: Frame, state: State) -> list[Hit]:
        values = frame.metric(self.metric)
        if values is None:
            return []
        x = self.transform(values)
        measured = np.isfinite(x)
        median, margin = state["median"], self.limit * state["sd"]
        armed = measured & (margin > 0.0) & (frame.step >= 2 * self.warmup_steps)
        limit = median + margin
        risen, _ = self._gate().step(state, armed, [x > limit], x < median + self.clear_fraction * margin)
        hits = [
            Hit(
                position,
                "warning",
                float(values[position]),
                self.value(float(median[position])),
                self.value(float(limit[position])),
            )
            for position in risen.tolist()
        ]
        accept = settled = measured & self.enters_baseline(x)
        opened = state["open"] > 0
        open_steps = state["open_steps"]
        if opened.any():
            accept = settled & (~opened | (open_steps % self.relearn_every == self.relearn_every - 1))
            open_steps += measured
        self._baseline().push(state, x, accept)
        return hits


@dataclass(frozen=True, slots=True)
class Growth(RelativeRule):
    """The largest logit of a head grows far out of the head's own range. x = ln(max(max_logit, floor)).

    Attributes:
        limit: of z. Default 8.
        patience: measured steps in a row beyond the limit before it alarms. Default 5.
        clear_fraction: the alert closes at z below this fraction of ``limit`` ... Default 0.5.
        clear_steps: ... for so many measured steps in a row; then it can fire again. Default 5.
        warmup_steps: optimizer steps of the run's learning-rate warm-up; the rule is armed from step
            2 * warmup_steps on. Default 100; give the run's own figure if it is longer.
        window, gap: in measured steps. Default 200 and 20.
        min_history: values in the window before it is used. Default None, the whole window, so that the rule is
            armed from a head's 220th measured step on: a window that reaches back to before the heads began
            to learn is too narrow a normal, and healthy young runs alarm.
        sd_floor: least sd of x. Default 0.05: it takes a factor of at least exp(8 * 0.05) = 1.49.
        floor: in logits; smaller (and negative) values count as this, and enter no baseline. Default 1: a head
            whose logits stay below has not begun to attend, and from there every healthy head grows.
        refresh_every: in measured steps, how often median and sd are computed anew. Default 10.
        relearn_every: while open, one value in so many enters the window. Default 10.

    Source: trial of 126 runs. 56 to 123 steps ahead of the loss spike on learning-rate ramps, 72 with qk-norm.
    """

    name: ClassVar[str] = "growth"
    metric: ClassVar[str] = "max_logit"
    metrics: ClassVar[tuple[str, ...]] = ("max_logit",)

    limit: float = 8.0
    patience: int = 5
    clear_fraction: float = 0.5
    clear_steps: int = 5
    warmup_steps: int = 100
    window: int = 200
    gap: int = 20
    min_history: int | None = None
    sd_floor: float = 0.05
    floor: float = 1.0
    refresh_every: int = 10
    relearn_every: int = 10

    def __post_init__(self) -> None:
        self._check_common()
        check_number("Growth", "floor", self.floor)

    def transform(self, values: FloatVector) -> FloatVector:
        return np.log(np.where(np.isneginf(values), np.nan, np.maximum(values, self.floor)))

    def enters_baseline(self, x: FloatVector) -> Mask:
        return x > math.log(self.floor)

    def value(self, x: float) -> float:
        return math.exp(x)

    def describe(self, hit: Hit) -> str:
        assert hit.baseline is not None
        return (
            f"max_logit is {digits(hit.value)}, above {digits(hit.threshold)} for {self.patience} measured steps in a "
            f"row; this head's normal level is {digits(hit.baseline)}. Such growth often comes before a loss spike, "
            "though not always: watch the loss, and if it goes on lower the learning rate or add qk-norm or a softcap."
        )


@dataclass(frozen=True, slots=True)
class Uniform(RelativeRule):
    """A head's attention becomes more uniform than its own normal level (saturation). x = logit of ``entropy_norm``.

    Attributes:
        limit: of z. Default 5.
        patience: measured steps in a row beyond the limit before it alarms. Default 5.
        clear_fraction: the alert closes at z below this fraction of ``limit`` ... Default 0.5.
        clear_steps: ... for so many measured steps in a row; then it can fire again. Default 5.
        warmup_steps: the rule is armed from optimizer step 2 * warmup_steps on. Default 0.
        window, gap: in measured steps. Default 100 and 50.
        min_history: values in the window before it is used. Default None, the whole window, so that the rule is
            armed from a head's 150th measured step on.
        sd_floor: least sd of x. Default 0.05.
        clip: entropy_norm is clipped to [clip, 1 - clip]. Default 0.01: changes among heads that are all but
            one-hot, or all but uniform, are nothing to tell. A head whose normal level is that high cannot alarm.
        refresh_every: in measured steps, how often median and sd are computed anew. Default 10.
        relearn_every: while open, one value in so many enters the window. Default 10.

    Source: trial of 126 runs (weight decay on q and k: 12 steps after the fault; softmax scale falling to 0: 37).
    """

    name: ClassVar[str] = "uniform"
    metric: ClassVar[str] = "entropy_norm"
    metrics: ClassVar[tuple[str, ...]] = ("entropy_norm",)

    limit: float = 5.0
    patience: int = 5
    clear_fraction: float = 0.5
    clear_steps: int = 5
    warmup_steps: int = 0
    window: int = 100
    gap: int = 50
    min_history: int | None = None
    sd_floor: float = 0.05
    clip: float = 0.01
    refresh_every: int = 10
    relearn_every: int = 10

    def __post_init__(self) -> None:
        self._check_common()
        check_number("Uniform", "clip", self.clip, below=0.5)

    def transform(self, values: FloatVector) -> FloatVector:
        ratio = np.where(np.isfinite(values), np.minimum(np.maximum(values, self.clip), 1.0 - self.clip), np.nan)
        return np.log(ratio / (1.0 - ratio))

    def value(self, x: float) -> float:
        return 1.0 / (1.0 + math.exp(-x))

    def describe(self, hit: Hit) -> str:
        assert hit.baseline is not None
        return (
            f"entropy_norm is {digits(hit.value)}, above {digits(hit.threshold)} for {self.patience} measured steps in "
            f"a row; this head's normal level is {digits(hit.baseline)} (1 is uniform attention). A head that becomes "
            "uniform tends to stop selecting tokens, often at little cost in loss: check weight decay on the query and "
            "key projections, and the softmax scale."
        )
