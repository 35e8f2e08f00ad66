import json
import math
import time

import numpy as np
import pytest
import torch

import attnmon.rules as public
from attnmon.errors import AttnmonError
from attnmon.rules import Ceiling, Growth, LowTemperature, NonFinite, RuleSet, Uniform, default_rules
from attnmon.types import Snapshot
from tests.helpers import slow_but

NAN = float("nan")
METRICS = ("max_logit", "entropy_norm", "effective_temperature")
SIZES = {"blocks.0.attn": 4, "blocks.1.attn": 2, "blocks.2.cross": 7}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def healthy(rng, sizes, drift=0.0):
    """One step of noise about healthy levels, different from head to head: metric -> path -> numbers."""
    levels = {path: np.linspace(-1.0, 1.0, heads) for path, heads in sizes.items()}
    noise = {metric: {path: rng.standard_normal(heads) for path, heads in sizes.items()} for metric in METRICS}
    return {
        "max_logit": {p: 12.0 * np.exp(0.5 * levels[p] + drift + 0.12 * noise["max_logit"][p]) for p in sizes},
        "entropy_norm": {
            p: 1 / (1 + np.exp(-(2 * levels[p] + drift + 0.15 * noise["entropy_norm"][p]))) for p in sizes
        },
        "effective_temperature": {
            p: 0.6 * np.exp(0.5 * levels[p] - drift + 0.1 * noise["effective_temperature"][p]) for p in sizes
        },
    }


def eventful(rng, snapshot, steps=700):
    """A run with faults of every kind, holes, and a module that comes late."""
    run = []
    for step in range(steps):
        sizes = dict(list(SIZES.items())[: 2 if step < 50 else 3])
        values = healthy(rng, sizes)
        counts = {path: np.zeros(heads) for path, heads in sizes.items()}
        values["max_logit"]["blocks.0.attn"][3] *= 8.0  # hot, in part, from the start
        values["max_logit"]["blocks.0.attn"][1] *= 1.03 ** max(0, step - 350)
        values["entropy_norm"]["blocks.1.attn"][0] = 0.97 if 400 < step < 500 else 0.5
        values["effective_temperature"]["blocks.0.attn"][2] *= 0.1 if step % 100 >= 70 else 1.0
        if step > 60 and step % 45 == 0:
            counts["blocks.2.cross"][5] = 2
        for metric in METRICS:
            for path in sizes:
                values[metric][path][rng.random(sizes[path]) < 0.02] = NAN
        run.append(snapshot(step, values, counts))
    return run


def test_public_names():
    assert set(public.__all__) == {
        "Ceiling", "Growth", "LowTemperature", "NonFinite", "Rule", "RuleSet", "Uniform", "default_rules",
    }  # fmt: skip
    rules = default_rules()
    assert [type(rule) for rule in rules] == [NonFinite, Ceiling, Growth, Uniform, LowTemperature]
    assert RuleSet().rules == rules
    assert RuleSet().metrics == METRICS


def test_healthy_noise_gives_no_alarm(rng, snapshot):
    rules = RuleSet()
    for step in range(4000):
        drift = 0.3 * math.sin(step / 400)
        assert rules.update(snapshot(step, healthy(rng, SIZES, drift))) == []
    assert rules.open_alerts == []


def test_every_fault_is_told_with_the_right_head(rng, snapshot):
    rules = RuleSet()
    alerts = [alert for snap in eventful(rng, snapshot) for alert in rules.update(snap)]
    assert {(alert.rule, alert.severity, alert.module, alert.head) for alert in alerts} == {
        ("non_finite", "critical", "blocks.2.cross", 5),
        ("ceiling", "info", "blocks.0.attn", 3),
        ("ceiling", "warning", "blocks.0.attn", 1),
        ("ceiling", "critical", "blocks.0.attn", 1),
        ("growth", "warning", "blocks.0.attn", 1),
        ("uniform", "warning", "blocks.1.attn", 0),
        ("low_temperature", "warning", "blocks.0.attn", 2),
    }
    for alert in alerts:
        assert alert.message.startswith(f"head {alert.head} of {alert.module}: ")
        assert math.isfinite(alert.value)
        assert math.isfinite(alert.threshold)


@pytest.mark.parametrize("interrupted_at", slow_but((2, 103, 421), (2, 3, 57, 103, 362, 410, 421, 600)))
def test_resumed_equals_uninterrupted(rng, snapshot, interrupted_at):
    run = eventful(rng, snapshot)
    through = RuleSet()
    expected = [through.update(snap) for snap in run]
    before, after = RuleSet(), RuleSet()
    for snap in run[:interrupted_at]:
        before.update(snap)
    saved = before.state_dict()
    after.load_state_dict(json.loads(json.dumps(saved, allow_nan=False)))
    assert after.state_dict() == saved
    assert after.open_alerts == before.open_alerts
    assert [after.update(snap) for snap in run[interrupted_at:]] == expected[interrupted_at:]
    assert after.open_alerts == through.open_alerts
    assert after.state_dict() == through.state_dict()


def test_state_survives_a_safe_torch_checkpoint(play, tmp_path):
    rules = RuleSet()
    play(rules, "max_logit", [[10.0, 60.0]] * 90)
    torch.save(rules.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == rules.state_dict()


def test_resume_in_mid_alert_and_mid_patience(play):
    saved = RuleSet([Ceiling()])
    play(saved, "max_logit", [[10.0, 10.0]] * 5 + [[60.0, 10.0]] * 6 + [[60.0, 60.0]] * 3)
    resumed = RuleSet([Ceiling()])
    resumed.load_state_dict(saved.state_dict())
    assert [alert.head for alert in resumed.open_alerts] == [0]
    assert [(a.step, a.head) for a in play(resumed, "max_logit", [[60.0, 60.0]] * 9, first_step=14)] == [(15, 1)]


def test_state_holds_plain_values_and_is_a_copy(rng, snapshot):
    rules = RuleSet()
    for snap in eventful(rng, snapshot, 120):
        rules.update(snap)
    state = rules.state_dict()
    kinds = set()

    def visit(node):
        kinds.add(type(node))
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            visit(child)

    visit(state)
    assert kinds <= {dict, list, int, float, str, type(None)}
    text = json.dumps(state)
    rules.update(snapshot(120, healthy(rng, SIZES)))
    assert json.dumps(state) == text


def test_state_of_another_model_is_ignored(play, rng, snapshot):
    other = RuleSet()
    for snap in eventful(rng, snapshot, 450):
        other.update(snap)
    state = other.state_dict()
    rules, fresh = RuleSet(), RuleSet()
    rules.load_state_dict(state)
    for step in range(30):
        snap = snapshot(step, {"max_logit": {"encoder.attn": [10.0 + 4 * step], "blocks.0.attn": [60.0] * 3}})
        assert rules.update(snap) == fresh.update(snap)
    assert rules.open_alerts == fresh.open_alerts != []


@pytest.mark.parametrize("rule", [Ceiling(start_steps=9), Ceiling(patience=3), Growth(window=70), Uniform(gap=3)])
def test_state_of_rules_with_other_parameters_does_not_crash(rule, play):
    saved, rules = RuleSet(), RuleSet([rule])
    play(saved, rule.metric, [0.5] * 150)
    rules.load_state_dict(saved.state_dict())
    play(rules, rule.metric, [0.5] * 150)


DAMAGED = {"ceiling": {**{key: array.tolist() for key, array in Ceiling().new_state(1).items()}, "run": [[0, "x"]]}}


@pytest.mark.parametrize("part", [{}, None, {"ceiling": 3}, {"ceiling": {"open": "x"}}, DAMAGED])
def test_damaged_parts_start_afresh(part, play):
    rules = RuleSet([Ceiling()])
    rules.load_state_dict({"version": 1, "modules": {"blocks.0.attn": part}})
    assert [alert.severity for alert in play(rules, "max_logit", [60.0] * 5)] == ["info"]


@pytest.mark.parametrize(
    "state", [None, {}, {"version": 2, "modules": {}}, {"version": 1, "modules": {}, "open_alerts": [{"step": 1}]}]
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(AttnmonError, match="the state"):
        RuleSet().load_state_dict(state)


def test_a_module_whose_heads_change_starts_afresh_and_the_others_go_on(snapshot):
    rules = RuleSet([Ceiling()])

    def feed(step, first, second):
        return rules.update(snapshot(step, {"max_logit": {"a": first, "b": second}}))

    for step in range(9):
        feed(step, [10.0 if step < 5 else 60.0] * 2, [10.0 if step < 5 else 60.0] * 2)
    alerts = feed(9, [60.0] * 3, [60.0] * 2)
    assert [(alert.module, alert.head) for alert in alerts] == [("b", 0), ("b", 1)]
    alerts = [alert for step in range(10, 20) for alert in feed(step, [60.0] * 3, [60.0] * 2)]
    assert [(alert.step, alert.severity, alert.module) for alert in alerts] == [(13, "info", "a")] * 3


def test_a_loaded_state_is_used_once(snapshot):
    saved, rules = RuleSet([Ceiling()]), RuleSet([Ceiling()])
    for step in range(9):
        saved.update(snapshot(step, {"max_logit": {"a": [10.0 if step < 5 else 60.0] * 2}}))
    rules.load_state_dict(saved.state_dict())
    for step, heads in ((9, 3), (10, 2), (11, 2)):
        assert rules.update(snapshot(step, {"max_logit": {"a": [60.0] * heads}})) == []


def test_alerts_come_in_the_models_order(snapshot):
    rules = RuleSet([Ceiling()])
    alerts = []
    for step in range(20):
        level = [10.0] if step < 10 else [60.0]
        modules = {"b": level} if step == 0 else {"a": level, "b": level, "c": level}
        alerts += rules.update(snapshot(step, {"max_logit": modules}))
    assert [alert.module for alert in alerts] == ["a", "b", "c"]


def test_ragged_late_and_absent_modules(snapshot):
    rules = RuleSet([Ceiling()])
    alerts = []
    for step in range(40):
        values = {"a": [10.0], "b": [10.0] * 5}
        if step >= 10:
            values["c"] = [10.0, 10.0, 60.0 if step >= 20 else 10.0]
        if step % 2:
            del values["b"]
        elif step >= 10:
            values["b"][4] = 60.0
        alerts += rules.update(snapshot(step, {"max_logit": values}))
    assert [(alert.step, alert.module, alert.head) for alert in alerts] == [(18, "b", 4), (24, "c", 2)]


def test_every_head_of_a_layer_is_told(play):
    series = np.full((20, 12), 10.0)
    series[10:] = 60.0
    assert [alert.head for alert in play(Ceiling(), "max_logit", series)] == list(range(12))


def test_snapshots_without_the_metric_are_no_data(snapshot):
    rules = RuleSet()
    for step in range(300):
        assert rules.update(snapshot(step, {"entropy": {"a": [1.0]}})) == []
    bare = Snapshot(step=0, modules=("a",), values={}, rows={}, excluded={})
    assert rules.update(bare) == []
    assert RuleSet([]).update(bare) == []


def test_a_count_of_heads_that_disagrees_within_a_snapshot_is_no_data(snapshot):
    rules = RuleSet([Ceiling()])
    for step in range(20):
        snap = snapshot(step, {"entropy": {"a": [1.0, 1.0]}, "max_logit": {"a": [60.0]}})
        assert rules.update(snap) == []


def test_what_is_no_rule_or_there_twice_is_refused():
    with pytest.raises(AttnmonError, match=r"instances of attnmon\.rules\.Rule"):
        RuleSet([Ceiling])
    with pytest.raises(AttnmonError, match="'ceiling' is there 2 times"):
        RuleSet([Ceiling(), Ceiling(warning=60.0)])


def test_memory_is_bounded_and_an_update_is_cheap(rng, snapshot):
    sizes = {f"blocks.{layer}.attn": 12 for layer in range(12)}
    rules = RuleSet()
    snaps = [snapshot(step, healthy(rng, sizes)) for step in range(200)]
    for snap in snaps:
        rules.update(snap)
    shapes = {name: {k: v.shape for k, v in state.items()} for name, state in rules._states.items()}
    started = time.perf_counter()
    for snap in snaps:
        rules.update(snap)
    seconds = (time.perf_counter() - started) / len(snaps)
    assert {name: {k: v.shape for k, v in state.items()} for name, state in rules._states.items()} == shapes
    assert seconds < 3e-3  # ten times what it takes: a loop over heads would not pass
