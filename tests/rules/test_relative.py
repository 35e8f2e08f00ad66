import numpy as np
import pytest

from attnmon.errors import AttnmonError
from attnmon.rules import Growth, RuleSet, Uniform
from attnmon.rules.baseline import LaggedWindow

NAN, INF = float("nan"), float("inf")


def logs(rng, steps, heads, level=10.0, sd=0.1):
    return level * np.exp(sd * rng.standard_normal((steps, heads)))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def test_growth_names_the_head_and_converts_the_limit(play):
    series = np.full((320, 4), 8.0)
    series[300:, 2] = 20.0
    (alert,) = play(Growth(), "max_logit", series)
    assert (alert.step, alert.rule, alert.severity, alert.head) == (304, "growth", "warning", 2)
    assert alert.value == 20.0
    assert alert.baseline == pytest.approx(8.0, rel=1e-5)
    assert alert.threshold == pytest.approx(8.0 * np.exp(8 * 0.05), rel=1e-5)
    assert "this head's normal level is 8." in alert.message


@pytest.mark.parametrize(("after", "fires"), [(0.99, False), (1.01, True)])
def test_growth_fires_at_its_threshold(play, after, fires):
    threshold = 8.0 * np.exp(8 * 0.05)
    assert bool(play(Growth(), "max_logit", [8.0] * 300 + [threshold * after] * 5)) is fires


def test_growth_measures_in_the_heads_own_spread(play, rng):
    series = logs(rng, 300, 2, sd=0.01)
    series[:, 1] = logs(rng, 300, 1, sd=0.3)[:, 0]
    jump = np.full((10, 2), 10.0 * np.exp(1.5))
    assert [alert.head for alert in play(Growth(), "max_logit", np.vstack([series, jump]))] == [0]


def test_patience_and_no_data(play):
    calm = [8.0] * 300
    assert play(Growth(), "max_logit", calm + ([20.0] * 4 + [8.0]) * 20) == []
    alerts = play(Growth(), "max_logit", [*calm, 20, NAN, 20, 20, INF, 20, NAN, 20])
    assert [alert.step for alert in alerts] == [307]


def test_growth_is_armed_after_twice_the_warm_up(play):
    series = [8.0] * 150 + [30.0] * 100  # the jump is 49 steps old when the rule is armed at step 200
    assert [alert.step for alert in play(Growth(min_history=50), "max_logit", series)] == [204]
    assert [alert.step for alert in play(Growth(warmup_steps=0, min_history=50), "max_logit", series)] == [154]
    assert play(Growth(warmup_steps=125, min_history=50), "max_logit", series[:250]) == []


def test_no_baseline_before_enough_history(play):
    rule = Growth(warmup_steps=0, min_history=50)
    assert play(rule, "max_logit", [8.0] * 69 + [30.0] * 4) == []
    assert play(rule, "max_logit", [8.0] * 60 + [30.0] * 5) == []
    assert [alert.step for alert in play(rule, "max_logit", [8.0] * 70 + [30.0] * 5)] == [74]


def test_the_baseline_is_a_whole_window_by_default(play):
    assert play(Growth(), "max_logit", [8.0] * 200 + [30.0] * 19) == []
    assert [alert.step for alert in play(Growth(), "max_logit", [8.0] * 220 + [30.0] * 5)] == [224]


def test_a_young_run_whose_logits_set_out_to_grow_is_healthy(play):
    # as in a GPT-2 from scratch: flat for 180 steps, then from 0.5 to 4 in 100 and on to 9 in 300
    rise = [0.5] * 180 + list(np.geomspace(0.5, 4.0, 100)) + list(np.geomspace(4.0, 9.0, 300))
    assert play(Growth(), "max_logit", rise) == []
    assert len(play(Growth(), "max_logit", [*rise, *[9.0] * 100, *np.geomspace(9.0, 60.0, 40)])) == 1


def test_hysteresis(play):
    rules = RuleSet([Growth()])
    assert len(play(rules, "max_logit", [8.0] * 300 + [20.0] * 30 + [10.5] * 9 + [20.0] * 9)) == 1  # 10.5: z > 4
    assert len(rules.open_alerts) == 1
    assert play(rules, "max_logit", [8.0] * 5, first_step=400) == []
    assert rules.open_alerts == []
    assert len(play(rules, "max_logit", [20.0] * 5, first_step=405)) == 1


def test_open_faults_become_normal_slowly(play):
    rules = RuleSet([Growth()])
    assert len(play(rules, "max_logit", [8.0] * 300 + [20.0] * 900)) == 1
    assert len(rules.open_alerts) == 1
    assert play(rules, "max_logit", [20.0] * 500, first_step=1200) == []
    assert rules.open_alerts == []
    (alert,) = play(rules, "max_logit", [50.0] * 5, first_step=1700)
    assert alert.baseline == pytest.approx(20.0, rel=1e-5)


def test_no_number_that_is_not_finite_enters_a_baseline(play, rng):
    clean = logs(rng, 400, 3)
    clean[330:, 1] *= 10.0  # an open alert too
    holes = np.repeat(clean, 2, axis=0)
    holes[1::2] = [NAN, INF, -INF]
    rules, holed = RuleSet([Growth()]), RuleSet([Growth()])
    play(rules, "max_logit", clean)
    play(holed, "max_logit", holes)
    assert holed.state_dict()["modules"] == rules.state_dict()["modules"]
    assert [alert.head for alert in holed.open_alerts] == [1]


def test_small_and_negative_logits_are_no_growth(play):
    assert play(Growth(), "max_logit", [-3.0] * 300 + [0.9] * 50) == []
    assert play(Growth(), "max_logit", [0.01] * 300 + [0.9] * 50) == []
    assert play(Growth(), "max_logit", [-3.0] * 300 + [2.0] * 5) == []  # it has only begun to attend
    assert len(play(Growth(floor=0.1), "max_logit", [0.2] * 300 + [2.0] * 5)) == 1


@pytest.mark.parametrize(("factor", "fires"), [(1.001, False), (1.03, True)])
def test_slow_drift_is_normal_and_a_ramp_is_not(play, rng, factor, fires):
    ramp = np.concatenate([np.ones(300), factor ** np.arange(150)])[:, None]
    alerts = play(Growth(), "max_logit", logs(rng, 450, 4, sd=0.05) * ramp)
    assert sorted(alert.head for alert in alerts) == ([0, 1, 2, 3] if fires else [])


def test_uniform_names_the_head_and_converts_the_limit(play, rng):
    series = sigmoid(0.5 + 0.1 * rng.standard_normal((400, 3)))
    series[350:, 0] = 0.95
    (alert,) = play(Uniform(), "entropy_norm", series)
    assert (alert.step, alert.rule, alert.severity, alert.head) == (354, "uniform", "warning", 0)
    assert alert.baseline == pytest.approx(sigmoid(0.5), abs=0.02)
    assert alert.threshold == pytest.approx(sigmoid(1.0), abs=0.04)


def test_uniform_ignores_collapse_and_moves_near_the_ends(play):
    assert play(Uniform(), "entropy_norm", [0.6] * 200 + [0.01] * 50) == []
    assert play(Uniform(), "entropy_norm", [1e-6] * 200 + [0.009] * 50) == []
    assert play(Uniform(), "entropy_norm", [0.991] * 200 + [1.0] * 50) == []
    assert play(Uniform(), "entropy_norm", [0.0] * 200 + [NAN] * 50 + [0.0] * 50) == []


@pytest.mark.parametrize(("x", "fires"), [(0.24, False), (0.26, True)])
def test_uniform_fires_at_its_threshold(play, x, fires):
    alerts = play(Uniform(), "entropy_norm", [0.5] * 200 + [sigmoid(x)] * 20)
    assert len(alerts) == fires
    if fires:
        assert alerts[0].threshold == pytest.approx(sigmoid(0.25), rel=1e-5)


def test_uniform_slow_drift_is_normal(play, rng):
    x = np.linspace(-2.0, 2.0, 2000)[:, None] + 0.1 * rng.standard_normal((2000, 3))
    assert play(Uniform(), "entropy_norm", sigmoid(x)) == []


@pytest.mark.parametrize("rule", [Growth, Uniform])
@pytest.mark.parametrize(
    ("name", "bad", "accepted"),
    [
        ("limit", 0.0, "finite number > 0"),
        ("patience", 0, "whole number of at least 1"),
        ("window", 1.5, "whole number of at least 1"),
        ("window", 20, "min_history must be at most window"),
        ("gap", 0, "whole number of at least 1"),
        ("min_history", 1, "whole number of at least 2"),
        ("warmup_steps", -1, "whole number of at least 0"),
        ("sd_floor", 0.0, "finite number > 0"),
        ("refresh_every", 0, "whole number of at least 1"),
        ("relearn_every", 0, "whole number of at least 1"),
        ("clear_fraction", 2.0, "<= 1"),
        ("clear_steps", 0, "whole number of at least 1"),
    ],
)
def test_bad_parameters_name_what_is_accepted(rule, name, bad, accepted):
    with pytest.raises(AttnmonError, match=rf"{rule.__name__}: .*{accepted}"):
        rule(**{"min_history": 50, name: bad})


def test_bad_floor_and_clip():
    with pytest.raises(AttnmonError, match="Growth: floor must be a finite number > 0"):
        Growth(floor=0.0)
    with pytest.raises(AttnmonError, match=r"Uniform: clip must be a finite number > 0 and < 0\.5"):
        Uniform(clip=0.5)


@pytest.mark.parametrize("steps", [11, 14, 15, 40, 63])
def test_lagged_window_is_median_and_mad_of_the_values_older_than_the_gap(rng, steps):
    window, gap, heads = 8, 5, 3
    lagged = LaggedWindow(window, gap, min_history=6, sd_floor=1e-9, refresh=1)
    state = lagged.new_state(heads)
    values = rng.standard_normal((steps, heads)).astype(np.float32).astype(np.float64)
    accept = rng.random((steps, heads)) < 0.999
    accept[3, 1] = accept[5, 1] = False
    for step in range(steps):
        lagged.push(state, values[step], accept[step])
    for head in range(heads):
        past = values[accept[:, head], head][:-gap][-window:]
        assert state["sd"][head] == (
            pytest.approx(1.4826 * np.median(np.abs(past - np.median(past))), rel=1e-5) if len(past) >= 6 else 0.0
        )
        assert state["median"][head] == pytest.approx(np.median(past) if len(past) >= 6 else 0.0, rel=1e-6)
