"""Rules relative to the head's own normal level: growth of the largest logit, attention becoming uniform.

Both rules compare a transformed metric x with a lagged window of the head's own past: z = (x - median) / sd, where
sd = 1.4826 * MAD of the window, at least ``sd_floor``. Windows count measured steps. Defaults come from a trial of 126
runs: on the ten healthy runs kept for checking (125,000 head-steps), growth gave no false alarm and uniform gave four
(all in one run). A lagged window cannot see slow ramps, nor a run that is bad from the start.

While an alert is open, only every ``relearn_every``-th value of that head enters its window: a fault does not become
the new normal quickly, but a lasting change does in the end. With the defaults, growth accepts a new level after about
1,200 measured steps and uniform after about 1,000; the alert then closes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from attnmon.checks import check_number, check_whole
from attnmon.errors import AttnmonError
from attnmon.rules.base import Hit, State, digits
from attnmon.rules.baseline import LaggedWindow
from attnmon.rules.debounce import Mask, PatientRule
from attnmon.rules.heads import FlatHeads, FloatVector


@dataclass(frozen=True)
class RelativeRule(PatientRule):
    """Base of rules that compare a head with its own lagged window. State adds ``open_steps`` int64 [heads].

    Attributes:
        limit: of z.
        clear_fraction: an alert closes when z is below this fraction of ``limit``. Default 0.5.
        warmup_steps: the rule is armed from optimizer step ``2 * warmup_steps`` on.
        window: length of the window, in measured steps.
        gap: how many of the newest measured steps the window leaves out.
        min_history: values that the window must contain before it is used; at least 2, at most ``window``. Default
            None, the whole window: the rule is armed from measured step ``window + gap`` of a head on. A window
            that reaches back to before the heads began to learn is too narrow a normal, and healthy young runs alarm.
        sd_floor: least sd of x. Default 0.05.
        refresh_every: median and sd are computed anew once per this many measured steps. Default 10.
        relearn_every: while an alert is open, one value in this many enters the window. Default 10.

    ``patience`` and ``clear_steps`` are documented in ``attnmon.rules.debounce``.
    """

    limit: float
    _: KW_ONLY
    clear_fraction: float = 0.5
    warmup_steps: int
    window: int
    gap: int
    min_history: int | None = None
    sd_floor: float = 0.05
    refresh_every: int = 10
    relearn_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit", "sd_floor"):
            check_number(self._option(name), getattr(self, name))
        for name in ("window", "gap", "refresh_every", "relearn_every"):
            check_whole(self._option(name), getattr(self, name))
        check_whole(self._option("warmup_steps"), self.warmup_steps, least=0)
        check_whole(self._option("min_history"), self.min_history, least=2, none_means="the whole window")
        if self.min_history is not None and self.min_history > self.window:
            raise AttnmonError(
                f"{self._option('min_history')} must be at most window ({self.window}); got {self.min_history!r}"
            )

    @abstractmethod
    def transform(self, values: FloatVector) -> FloatVector:
        """Convert values of the metric to x; not finite where there is no data."""

    @abstractmethod
    def value(self, x: float) -> float:
        """Convert an x back to a value of the metric."""

    def enters_baseline(self, x: FloatVector) -> Mask:
        """Return which values may enter the window, [heads]; all of them unless a rule says otherwise."""
        return np.ones(x.shape, dtype=np.bool_)

    def _baseline(self) -> LaggedWindow:
        return LaggedWindow(self.window, self.gap, self.min_history or self.window, self.sd_floor, self.refresh_every)

    def new_state(self, num_heads: int) -> State:
        return {
            **super().new_state(num_heads),
            **self._baseline().new_state(num_heads),
            "open_steps": np.zeros(num_heads, dtype=np.int64),
        }

    def step(self, heads: FlatHeads, state: State) -> list[Hit]:
        values = heads.metric(self.metric)
        if values is None:
            return []
        x = self.transform(values)
        measured = np.isfinite(x)
        median, margin = state["median"], self.limit * state["sd"]
        armed = measured & (margin > 0.0) & (heads.step >= 2 * self.warmup_steps)
        limit = median + margin
        risen, _ = self._debounce().step(state, armed, [x > limit], x < median + self.clear_fraction * margin)
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


@dataclass(frozen=True)
class Growth(RelativeRule):
    """Reports a head whose largest logit grows far out of its own range. x = ln(max(max_logit, floor)).

    Attributes:
        limit: of z. Default 8; with the default ``sd_floor`` it takes a growth by at least exp(8 * 0.05) = 1.49.
        warmup_steps: optimizer steps of the run's learning-rate warm-up; give the run's own number if it is longer
            than the default. Default 100.
        window: in measured steps. Default 200.
        gap: in measured steps. Default 20.
        floor: in logits. A smaller (or negative) value counts as this and does not enter the window. Default 1: a
            head whose logits stay below has not begun to attend, and every healthy head grows from there.

    The other options are documented in ``attnmon.rules.relative.RelativeRule``; all but ``limit`` are keywords only.

    Raises:
        AttnmonError: an option is out of range.

    Source: trial of 126 runs. The rule fired 56 to 123 steps ahead of the loss spike on learning-rate ramps, and 72
    steps ahead with qk-norm.
    """

    name: ClassVar[str] = "growth"
    metric: ClassVar[str] = "max_logit"
    metrics: ClassVar[tuple[str, ...]] = ("max_logit",)

    limit: float = 8.0
    _: KW_ONLY
    warmup_steps: int = 100
    window: int = 200
    gap: int = 20
    floor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self._option("floor"), self.floor)

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


@dataclass(frozen=True)
class Uniform(RelativeRule):
    """Reports a head whose attention becomes more uniform than is normal for it. x = logit of ``entropy_norm``.

    Attributes:
        limit: of z. Default 5.
        warmup_steps: in optimizer steps. Default 0.
        window: in measured steps. Default 100.
        gap: in measured steps. Default 50.
        clip: ``entropy_norm`` is clipped to [clip, 1 - clip], because changes of heads that are nearly one-hot or
            nearly uniform mean little. A head whose normal level is above 1 - clip cannot alarm. Default 0.01.

    The other options are documented in ``attnmon.rules.relative.RelativeRule``; all but ``limit`` are keywords only.

    Raises:
        AttnmonError: an option is out of range.

    Source: trial of 126 runs. The rule fired 12 steps after weight decay on q and k set in, and 37 steps after the
    softmax scale began to fall to 0.
    """

    name: ClassVar[str] = "uniform"
    metric: ClassVar[str] = "entropy_norm"
    metrics: ClassVar[tuple[str, ...]] = ("entropy_norm",)

    limit: float = 5.0
    _: KW_ONLY
    warmup_steps: int = 0
    window: int = 100
    gap: int = 50
    clip: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self._option("clip"), self.clip, below=0.5)

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
