import dataclasses

import numpy as np
import pytest

from attnmon.errors import AttnmonError
from attnmon.rules import Ceiling, Growth, LowTemperature, RuleSet, Uniform, default_rules

NAN, INF = float("nan"), float("inf")
CALM = [10.0] * 5  # settles the start: not hot


def told(alerts):
    return [(alert.step, alert.severity) for alert in alerts]


def test_ceiling_names_head_step_and_numbers(play):
    series = np.full((12, 3), 10.0)
    series[6:, 1] = 60.0
    (alert,) = play(Ceiling(), "max_logit", series)
    assert (alert.step, alert.rule, alert.severity) == (10, "ceiling", "warning")
    assert (alert.module, alert.head, alert.metric) == ("blocks.0.attn", 1, "max_logit")
    assert (alert.value, alert.baseline, alert.threshold) == (60.0, None, 50.0)
    assert alert.message.startswith("head 1 of blocks.0.attn: max_logit is 60, above 50 for 5 measured steps")


@pytest.mark.parametrize("level", [50.0, 49.9, -1e4])
def test_ceiling_is_silent_at_and_below_the_limit(play, level):
    assert play(Ceiling(), "max_logit", CALM + [level] * 50) == []


@pytest.mark.parametrize("patience", [1, 2, 7])
def test_patience_counts_steps_in_a_row(play, patience):
    short = [60.0] * (patience - 1) + [10.0]
    rule = Ceiling(patience=patience)
    assert play(rule, "max_logit", CALM + short * 10) == []
    assert told(play(rule, "max_logit", CALM + [60.0] * patience)) == [(4 + patience, "warning")]


def test_steps_without_data_neither_advance_nor_reset(play):
    assert told(play(Ceiling(), "max_logit", [*CALM, 60, 60, NAN, 60, NAN, NAN, 60, INF, 60])) == [(13, "warning")]
    assert play(Ceiling(), "max_logit", [*CALM, 60, 60, NAN, 60, NAN, NAN, 60, NAN]) == []


def test_an_open_alert_is_told_again_only_after_it_was_clear(play):
    rules = RuleSet([Ceiling()])
    between = [60.0, 47.0] * 30  # within the limit, not clear of the lower one
    assert told(play(rules, "max_logit", [*CALM, *[60.0] * 40, *between, *[60.0] * 10])) == [(9, "warning")]
    assert [alert.step for alert in rules.open_alerts] == [9]
    assert play(rules, "max_logit", [44.0] * 4 + [47.0] + [44.0] * 4 + [60.0] * 5) == []
    assert play(rules, "max_logit", [44.0, 44.0, NAN, 44.0, 44.0]) == []
    assert len(rules.open_alerts) == 1
    assert play(rules, "max_logit", [44.0]) == []
    assert rules.open_alerts == []
    assert told(play(rules, "max_logit", [60.0] * 5, first_step=200)) == [(204, "warning")]


def test_escalation_is_one_further_alert(play):
    rules = RuleSet([Ceiling()])
    series = [*CALM, *[60.0] * 10, *[120.0] * 20, *[60.0] * 20, *[120.0] * 20]
    assert told(play(rules, "max_logit", series)) == [(9, "warning"), (19, "critical")]
    (alert,) = rules.open_alerts
    assert (alert.severity, alert.threshold) == ("critical", 100.0)


def test_a_jump_beyond_both_limits_is_one_critical_alert(play):
    assert told(play(Ceiling(), "max_logit", CALM + [150.0] * 20)) == [(9, "critical")]


def test_starts_hot_is_told_once_then_alarms_by_growth(play):
    rules = RuleSet([Ceiling()])
    noisy = [75.0, 74.0, 40.0, 76.0, 75.0]
    (info,) = play(rules, "max_logit", noisy + [75.0, 111.0] * 200)
    assert (info.step, info.severity, info.value, info.baseline, info.threshold) == (4, "info", 75.0, 75.0, 50.0)
    assert "starts hot" in info.message
    assert "above 112" in info.message
    assert rules.open_alerts == []
    alerts = play(rules, "max_logit", [113.0] * 20 + [226.0] * 10, first_step=500)
    assert told(alerts) == [(504, "warning"), (524, "critical")]
    assert [(alert.baseline, alert.threshold) for alert in alerts] == [(75.0, 112.5), (75.0, 225.0)]


def test_hot_heads_that_cool_keep_their_limits(play):
    assert told(play(Ceiling(), "max_logit", [75.0] * 5 + [10.0] * 50 + [80.0] * 50)) == [(4, "info")]


def test_start_ignores_steps_without_data(play):
    assert told(play(Ceiling(), "max_logit", [NAN, 75, NAN, 75, 75, INF, 75, 75, 75])) == [(7, "info")]


@pytest.mark.parametrize("start", [[75.0, 10.0, 10.0, 10.0, 10.0], [20.0, 30.0, 60.0, 70.0, 80.0]])
def test_noise_of_a_step_or_a_rise_through_the_limit_is_no_hot_start(play, start):
    alerts = play(Ceiling(), "max_logit", start + [80.0] * 5)
    assert [alert.severity for alert in alerts] == ["warning"]


def test_steps_before_a_hot_start_do_not_count_towards_its_own_limit(play):
    alerts = play(Ceiling(), "max_logit", [60.0] * 4 + [200.0] * 5)
    assert told(alerts) == [(4, "info"), (8, "critical")]


def test_nothing_alarms_before_the_start_is_decided(play):
    assert told(play(Ceiling(patience=1), "max_logit", [75.0] * 10)) == [(4, "info")]


def test_low_temperature(play):
    rules = RuleSet([LowTemperature()])
    assert play(rules, "effective_temperature", [1.0, 0.5, INF, 0.2, 0.1001] * 4) == []
    (alert,) = play(rules, "effective_temperature", [0.08] * 30, first_step=20)
    assert (alert.step, alert.rule, alert.severity, alert.metric) == (
        24,
        "low_temperature",
        "warning",
        "effective_temperature",
    )
    assert alert.value == pytest.approx(0.08)
    assert alert.baseline is None
    assert alert.threshold == pytest.approx(0.1)
    assert "logit standard deviation 12.5" in alert.message
    play(rules, "effective_temperature", [0.105] * 20)
    assert len(rules.open_alerts) == 1
    play(rules, "effective_temperature", [0.2, 0.2, INF, INF, 0.2])
    assert rules.open_alerts == []


def test_an_infinite_temperature_resets_patience_and_no_data_does_not(play):
    assert play(LowTemperature(), "effective_temperature", [1.0] * 5 + [0.05] * 4 + [INF] + [0.05] * 4) == []
    series = [1.0] * 5 + [0.05] * 4 + [NAN] + [0.05]
    assert told(play(LowTemperature(), "effective_temperature", series)) == [(10, "warning")]


def test_low_temperature_starts_hot(play):
    rules = RuleSet([LowTemperature()])
    (info,) = play(rules, "effective_temperature", [0.06] * 5 + [0.041] * 50)
    assert info.severity == "info"
    assert "below 0.04" in info.message
    (alert,) = play(rules, "effective_temperature", [0.039] * 5)
    assert alert.severity == "warning"
    assert (alert.baseline, alert.threshold) == (pytest.approx(0.06), pytest.approx(0.04))


@pytest.mark.parametrize("rule", [Ceiling, LowTemperature])
@pytest.mark.parametrize(
    ("name", "bad", "accepted"),
    [
        ("patience", 0, "whole number of at least 1"),
        ("patience", 2.5, "whole number of at least 1"),
        ("patience", True, "whole number of at least 1"),
        ("clear_steps", -1, "whole number of at least 1"),
        ("start_steps", 0, "whole number of at least 1"),
        ("clear_fraction", 1.5, "<= 1"),
        ("clear_fraction", 0.0, "> 0"),
        ("hot_factor", 1.0, "> 1"),
        ("hot_factor", NAN, "finite number > 1"),
    ],
)
def test_bad_parameters_name_what_is_accepted(rule, name, bad, accepted):
    with pytest.raises(AttnmonError, match=rf"{rule.__name__}: {name} .*{accepted}"):
        rule(**{name: bad})


@pytest.mark.parametrize(
    ("rule", "parameters", "message"),
    [
        (Ceiling, {"warning": 0.0}, "warning must be a finite number > 0"),
        (Ceiling, {"warning": "50"}, "warning must be"),
        (Ceiling, {"critical": INF}, "critical must be a finite"),
        (Ceiling, {"warning": 120.0}, r"critical must be larger than warning \(120\)"),
        (LowTemperature, {"limit": -0.1}, "limit must be a finite number > 0"),
    ],
)
def test_bad_limits(rule, parameters, message):
    with pytest.raises(AttnmonError, match=message):
        rule(**parameters)


def test_rules_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ceiling().warning = 3.0


@pytest.mark.parametrize("rule", default_rules())
def test_shared_options_are_keywords_that_replace_repr_and_equality_know(rule):
    other = dataclasses.replace(rule, clear_steps=9)
    assert other == type(rule)(clear_steps=9) != rule
    assert "clear_steps=9" in repr(other)


def test_limits_may_be_given_without_a_keyword():
    assert Ceiling(60.0, 90.0) == Ceiling(critical=90.0, warning=60.0)
    assert [rule(0.5).limit for rule in (Growth, Uniform, LowTemperature)] == [0.5] * 3
