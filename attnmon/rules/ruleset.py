"""Rules together with their state: takes snapshots, returns alerts, saves and restores its state exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from attnmon.errors import AttnmonError
from attnmon.rules.base import Hit, Rule, State
from attnmon.rules.heads import FlatHeads, HeadIndex
from attnmon.rules.limits import Ceiling, LowTemperature
from attnmon.rules.nonfinite import NonFinite
from attnmon.rules.relative import Growth, Uniform
from attnmon.types import Alert, Snapshot

_VERSION = 1


def default_rules() -> tuple[Rule, ...]:
    """Return the five rules that worked in a trial of 126 runs, with the limits of that trial.

    Build a tuple of your own to change one.
    """
    return (NonFinite(), Ceiling(), Growth(), Uniform(), LowTemperature())


class RuleSet:
    """Holds rules and, for every head of every module, their state.

    Modules may have different numbers of heads. A module may appear at any step and be absent from any. A head without
    a number at a step has no data, which advances and resets nothing. A module whose number of heads changes loses
    its state and starts as a new one.

    Args:
        rules: with different names. None means ``default_rules()``.

    Raises:
        AttnmonError: one of the rules is not a Rule, or two rules have the same name.
    """

    def __init__(self, rules: Iterable[Rule] | None = None) -> None:
        self._rules = default_rules() if rules is None else tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Rule):
                raise AttnmonError(
                    f"rules must be instances of attnmon.rules.Rule, such as Ceiling(warning=60.0), not {rule!r}"
                )
        names = [rule.name for rule in self._rules]
        for name in names:
            if names.count(name) > 1:
                raise AttnmonError(f"rules must have different names; {name!r} is there {names.count(name)} times")
        self._index: HeadIndex
        self._states: dict[str, State]
        self._alerts: dict[tuple[str, str, int], Alert]  # last alert of (rule, module, head); may be closed
        self._pending: dict[str, Any]  # loaded parts of modules that no snapshot has shown yet
        self._reset()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in the order given."""
        return self._rules

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the rules need, each once."""
        return tuple(dict.fromkeys(metric for rule in self._rules for metric in rule.metrics))

    @property
    def open_alerts(self) -> list[Alert]:
        """The alerts that are open, oldest first; a critical alert replaces its warning."""
        return [alert for key, alert in self._alerts.items() if self._is_open(key)]

    def update(self, snapshot: Snapshot) -> list[Alert]:
        """Advance every rule by one snapshot and return the alerts that it raises, by rule, then by head."""
        self._add_modules(snapshot)
        heads = FlatHeads(snapshot, self._index)
        alerts = []
        for rule in self._rules:
            for hit in rule.step(heads, self._states[rule.name]):
                alert = self._alert(rule, hit, snapshot.step)
                alerts.append(alert)
                key = (rule.name, alert.module, alert.head)
                self._alerts.pop(key, None)  # so that a replaced alert moves to the end of the order
                self._alerts[key] = alert
        return alerts

    def state_dict(self) -> dict[str, Any]:
        """Return baselines, counts and open alerts as nested dicts, lists, numbers and strings; all numbers finite."""
        modules = dict(self._pending)
        for path, states in self._split().items():
            modules[path] = {
                name: {key: array.tolist() for key, array in state.items()} for name, state in states.items()
            }
        return {
            "version": _VERSION,
            "modules": modules,
            "open_alerts": [alert.to_dict() for key, alert in self._alerts.items() if self._is_open(key, pending=True)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the present state by a saved one, so that alerts are those of a run that was not interrupted.

        A module receives its part when a snapshot first contains it. A part has no effect if its module never
        appears or has another number of heads, or if its rule is not in this RuleSet or has windows of another length.

        Args:
            state: what ``state_dict()`` returned.

        Raises:
            AttnmonError: ``state`` is not a state of a RuleSet, or its version is another one.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("modules"), Mapping):
            raise AttnmonError("the state must be what RuleSet.state_dict() returned: a dict with 'modules'")
        if state.get("version") != _VERSION:
            raise AttnmonError(f"the state must be of version {_VERSION}, not {state.get('version')!r}")
        alerts = {}
        for saved in state.get("open_alerts", ()):
            try:
                alert = Alert(**saved)
            except TypeError as error:
                raise AttnmonError(f"the state's open alerts must be what Alert.to_dict() returned: {error}") from None
            alerts[alert.rule, alert.module, alert.head] = alert
        self._reset()
        self._pending = dict(state["modules"])
        self._alerts = alerts

    def _reset(self) -> None:
        self._index = HeadIndex()
        self._states = {rule.name: rule.new_state(0) for rule in self._rules}
        self._alerts = {}
        self._pending = {}

    def _add_modules(self, snapshot: Snapshot) -> None:
        """Extend the state by modules that are new or whose number of heads changed."""
        changed: dict[str, int] = {}
        for path in snapshot.modules:
            num_heads = snapshot.num_heads(path)
            known = self._index.slots.get(path)
            if num_heads and (known is None or known.stop - known.start != num_heads):
                changed[path] = num_heads
        if not changed:
            return
        old, parts = self._index, self._split()
        for path, num_heads in changed.items():
            parts[path] = self._first_states(path, num_heads)
        order = dict.fromkeys(path for path in (*snapshot.modules, *parts) if path in parts)
        self._index = HeadIndex()
        for path in order:
            self._index.add(path, changed.get(path) or old.num_heads(path))
        for rule in self._rules:
            pieces = [parts[path][rule.name] for path in order]
            self._states[rule.name] = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}

    def _split(self) -> dict[str, dict[str, State]]:
        """Return module path -> rule name -> state of that module's heads."""
        return {
            path: {name: {key: array[slot] for key, array in state.items()} for name, state in self._states.items()}
            for path, slot in self._index.slots.items()
        }

    def _first_states(self, path: str, num_heads: int) -> dict[str, State]:
        """Return, per rule, the loaded state of a module, or a new state where no loaded one fits."""
        saved = self._pending.pop(path, None)
        by_rule = saved if isinstance(saved, Mapping) else {}
        return {rule.name: _restored(by_rule.get(rule.name), rule.new_state(num_heads)) for rule in self._rules}

    def _is_open(self, key: tuple[str, str, int], pending: bool = False) -> bool:
        """Return whether an alert is open.

        ``pending`` includes alerts of loaded modules that no snapshot has shown yet. Before the first snapshot they are
        always included.
        """
        name, path, head = key
        state, slot = self._states.get(name), self._index.slots.get(path)
        if state is None:
            return False
        if slot is None:
            return path in self._pending and (pending or not self._index.slots)
        return 0 <= head < slot.stop - slot.start and bool(state["open"][slot.start + head])

    def _alert(self, rule: Rule, hit: Hit, step: int) -> Alert:
        path, head = self._index.locate(hit.position)
        message = f"head {head} of {path}: {rule.describe(hit)}"
        return Alert(
            step, rule.name, hit.severity, path, head, rule.metric, hit.value, hit.baseline, hit.threshold, message
        )


def _restored(saved: Any, fresh: State) -> State:
    """Return the saved state in the types of ``fresh``, or ``fresh`` itself if the saved state does not fit it."""
    if not isinstance(saved, Mapping) or saved.keys() != fresh.keys():
        return fresh
    state: State = {}
    for key, template in fresh.items():
        try:
            array = np.array(saved[key], dtype=template.dtype)
        except (TypeError, ValueError):  # a ragged list, or no numbers
            return fresh
        if array.shape != template.shape:
            return fresh
        state[key] = array
    return state
