"""The monitor: which steps are measured, what they merge to, what becomes of faults."""

import inspect
import io
import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack as function_modes

import attnmon
import attnmon.stats.reference
from attnmon import AttnmonError, AttnmonWarning, Snapshot
from attnmon.metrics import METRICS
from attnmon.run.options import DEFAULTS, WatchKeywords
from attnmon.writers import Writer
from tests.models import SMALL_HEADS, SMALL_LENGTH, SMALL_WIDTH, SmallModel, small_inputs
from tests.run.watching import EVERY_ROW, Keeper, assert_close, attnmon_of, run


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SmallModel()


# -- schedule -------------------------------------------------------------------------------------------------


def test_every_nth_step_is_measured_and_the_others_carry_nothing(model):
    seen, hooked = [], []
    with attnmon.watch(model, every_n_steps=3) as monitor:
        assert monitor.latest is None
        assert monitor.flush() is None
        for _ in range(8):
            with monitor.step():
                hooked.append(bool(model.layers[0]._forward_hooks))
                model(small_inputs()).sum().backward()
            seen.append(monitor.latest.step)
    assert hooked == [True, False, False] * 2 + [True, False]
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]
    assert [record.calls for record in monitor.coverage()] == [3, 3]


def test_steps_are_counted_on_from_a_given_number(model):
    with attnmon.watch(model, every_n_steps=2) as monitor:
        assert run(monitor, model, small_inputs(), step=10).step == 10
        assert run(monitor, model, small_inputs()).step == 10  # this was 11
        assert run(monitor, model, small_inputs()).step == 12
        assert run(monitor, model, small_inputs(), step=4).step == 12  # each second step, whatever its number
        assert run(monitor, model, small_inputs(), step=7).step == 7


@pytest.mark.parametrize(
    ("every", "write_every", "steps", "written"),
    [
        (1, 1, range(4), [0, 1, 2, 3]),
        (1, 4, range(10), [3, 7, 9]),  # as a Trainer logs; the last one at close
        (3, 4, range(14), [0, 3, 9, 12]),
        (5, 2, range(12), [0, 5, 10]),
        (1, 10, range(0, 60, 2), [10, 20, 30, 40, 50, 58]),  # a loop that steps on every second number
        (1, 10, range(103, 124), [109, 119, 123]),
    ],
)
def test_writers_get_a_snapshot_at_their_own_pace(model, every, write_every, steps, written):
    keeper = Keeper()
    monitor = attnmon.watch(model, every_n_steps=every, write_every_n_steps=write_every, writers=keeper)
    for step in steps:
        run(monitor, model, small_inputs(2), step=step)
    monitor.close()
    assert keeper.steps == written
    assert keeper.log[-1] == "close"


def test_sampling_moves_from_step_to_step_and_repeats_from_run_to_run(model):
    def entropies():
        with attnmon.watch(model, rows=2, sequences=1, metrics="entropy") as monitor:
            return [run(monitor, model, small_inputs())["entropy"]["layers.0"].tolist() for _ in range(4)]

    first = entropies()
    assert len({tuple(heads) for heads in first}) == 4
    assert entropies() == first


# -- merging --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 3), (1, 4, 1), (5, 1)])
def test_micro_batches_merge_to_the_whole_batch(model, sizes):
    # a scale per sequence, so that rows, maxima and temperatures differ much between the parts
    hidden = small_inputs(sum(sizes)) * torch.linspace(0.3, 6.0, sum(sizes))[:, None, None]
    with attnmon.watch(model, **EVERY_ROW) as monitor:
        whole = run(monitor, model, hidden)
        parts = run(monitor, model, *hidden.split(sizes))
        assert parts.step == 1
    assert_close(parts, whole)
    assert parts.rows["layers.0"].tolist() == [sum(sizes) * SMALL_LENGTH] * SMALL_HEADS
    means = [
        attnmon_of(model, part)["entropy"]["layers.0"] for part in hidden.split(sizes)
    ]  # an average of averages would be wrong for parts of different sizes
    weighted = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / sum(sizes)
    np.testing.assert_allclose(parts["entropy"]["layers.0"], weighted, rtol=1e-5)
    if len(set(sizes)) > 1:
        assert not np.allclose(parts["entropy"]["layers.0"], sum(means) / len(means), rtol=1e-3)


def test_numbers_are_those_of_attention_stats(model):
    hidden = small_inputs(3, scale=3.0)
    snapshot = attnmon_of(model, hidden)
    layer = model.layers[0]
    with torch.no_grad():
        q, k, v = (
            layer.qkv(hidden).view(3, SMALL_LENGTH, 3, SMALL_HEADS, SMALL_WIDTH // SMALL_HEADS).permute(2, 0, 3, 1, 4)
        )
    expected = attnmon.attention_stats(q, k, v, is_causal=True, top_n=4)
    assert set(snapshot.metrics) == set(expected)
    for metric, heads in expected.items():
        np.testing.assert_allclose(snapshot[metric]["layers.0"], heads, rtol=1e-5, atol=1e-6, err_msg=metric)


def test_autocast_of_the_training_does_not_reach_the_statistics(model):
    taken = {}

    def sdpa(query, key, value, **kwargs):
        taken.setdefault("call", (query.detach().clone(), key.detach().clone(), value.detach().clone()))
        return real(query, key, value, **kwargs)

    real, F.scaled_dot_product_attention = F.scaled_dot_product_attention, sdpa
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(small_inputs(3, scale=4.0))
    finally:
        F.scaled_dot_product_attention = real
    with attnmon.watch(model, **EVERY_ROW) as monitor, torch.autocast("cpu", torch.bfloat16):
        snapshot = run(monitor, model, small_inputs(3, scale=4.0))
    assert taken["call"][0].dtype == torch.bfloat16
    expected = attnmon.stats.reference.attention_stats(*taken["call"], is_causal=True, top_n=4)
    for metric in ("entropy", "max_logit", "logit_std", "jacobian", "top_mass"):
        np.testing.assert_allclose(snapshot[metric]["layers.0"], expected[metric], rtol=1e-4, err_msg=metric)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_counts_each_call_once(model, use_reentrant):
    hidden = small_inputs().requires_grad_()
    bare = attnmon_of(model, hidden)
    model.checkpointing = use_reentrant
    with attnmon.watch(model, **EVERY_ROW) as monitor:
        assert_close(run(monitor, model, hidden), bare)
        assert [record.calls for record in monitor.coverage()] == [1, 1]
        run(monitor, model, hidden, hidden)
        assert [record.calls for record in monitor.coverage()] == [3, 3]


def test_two_monitors_on_one_model_see_the_same(model):
    with attnmon.watch(model, **EVERY_ROW) as one, attnmon.watch(model, **EVERY_ROW) as other:
        with one.step(), other.step():
            model(small_inputs()).sum().backward()
        assert_close(one.latest, other.latest, rtol=0)
        with other.step(), one.step():
            model(small_inputs()).sum().backward()
        assert_close(one.latest, other.latest, rtol=0)
        assert one.latest.step == other.latest.step == 1
    assert function_modes() == []


# -- life -----------------------------------------------------------------------------------------------------


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_an_exception_inside_a_step_drops_it_and_leaves_the_model_clean(model):
    with attnmon.watch(model) as monitor:
        run(monitor, model, small_inputs())
        for place in ("between", "inside"):
            model.layers[1].gain = None if place == "inside" else 1.0  # None * q raises in the middle of a forward
            with pytest.raises((TypeError, ZeroDivisionError)), monitor.step():  # noqa: PT012
                model(small_inputs())
                raise ZeroDivisionError
            assert (hooks(model), function_modes()) == (0, [])
            assert monitor.latest.step == 0
        model.layers[1].gain = 1.0
        after = run(monitor, model, small_inputs(), step=1)
    assert after.step == 1
    assert after.rows["layers.0"].tolist() == [4 * SMALL_LENGTH] * SMALL_HEADS  # nothing of the dropped steps is in it


def test_a_step_inside_a_step_is_ignored_with_one_warning(model):
    with attnmon.watch(model, **EVERY_ROW) as monitor:
        with monitor.step():
            model(small_inputs(1, seed=2)).sum().backward()
            with pytest.warns(AttnmonWarning, match="inside another step"), monitor.step():
                model(small_inputs(1, seed=3)).sum().backward()
            assert monitor.latest is None
            with pytest.raises(ZeroDivisionError), monitor.step():
                raise ZeroDivisionError
            model(small_inputs(1, seed=4)).sum().backward()
        assert monitor.latest.rows["layers.0"].tolist() == [3 * SMALL_LENGTH] * SMALL_HEADS
        assert run(monitor, model, small_inputs(1)).step == 1


def test_close_ends_it_for_good(model):
    keeper = Keeper()
    monitor = attnmon.watch(model, writers=[keeper])
    run(monitor, model, small_inputs())
    with monitor.step():
        model(small_inputs())
        monitor.close()
        assert hooks(model) == 0
        model(small_inputs())
    monitor.close()
    assert monitor.closed
    assert keeper.log == [("snapshot", 0), "close"]
    calls = [record.calls for record in monitor.coverage()]
    run(monitor, model, small_inputs())
    assert hooks(model) == 0
    assert [record.calls for record in monitor.coverage()] == calls
    assert monitor.flush().step == monitor.latest.step == 0


def test_flush_reaches_the_writers(model):
    keeper = Keeper()
    with attnmon.watch(model, writers=[keeper]) as monitor:
        run(monitor, model, small_inputs())
        assert monitor.flush() is monitor.latest
        assert keeper.log == [("snapshot", 0), "flush"]


def test_pausing_looks_away(model):
    with attnmon.watch(model, **EVERY_ROW) as monitor:
        with monitor.step():
            model(small_inputs(1))
            monitor.pause()
            model(small_inputs(2))
            monitor.resume()
            model(small_inputs(1))
        assert monitor.latest.rows["layers.0"].tolist() == [2 * SMALL_LENGTH] * SMALL_HEADS
        monitor.resume()  # no step is open
        assert hooks(model) == 0


# -- coverage and choice of modules ---------------------------------------------------------------------------


def test_coverage_waits_then_tells(model):
    with attnmon.watch(model) as monitor:
        assert [(record.path, record.status) for record in monitor.coverage()] == [
            ("layers.0", "waiting"),
            ("layers.1", "waiting"),
        ]
        with monitor.step():
            model.layers[0](small_inputs())
        first, second = monitor.coverage()
    assert (first.path, first.kind, first.heads, first.status, first.reason) == ("layers.0", "self", 2, "captured", "")
    assert (second.status, second.heads) == ("skipped", None)
    assert "no attention call" in second.reason


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "layers.1"}, {"layers.1"}),
        ({"include": ["layers.[02]", "layers.3"]}, {"layers.0", "layers.2", "layers.3"}),
        ({"exclude": "layers.0"}, {"layers.1", "layers.2", "layers.3"}),
        ({"include": "layers.*", "exclude": ("*.1", "*.2")}, {"layers.0", "layers.3"}),
        ({"include": (pattern for pattern in ["*.2"])}, {"layers.2"}),
    ],
)
def test_include_and_exclude(options, expected):
    model = SmallModel(layers=4)
    snapshot = attnmon_of(model, small_inputs(1), **options)
    assert set(snapshot.modules) == expected
    assert set(snapshot["entropy"]) == expected


def test_modules_stand_in_the_models_order():
    model = SmallModel(layers=12)
    assert attnmon_of(model, small_inputs(1), metrics="entropy").modules == tuple(
        f"layers.{index}" for index in range(12)
    )


# -- options --------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ({"every_n_steps": 0}, "every_n_steps must be a whole number of at least 1"),
    ({"every_n_steps": 1.5}, "every_n_steps must be a whole number of at least 1"),
    ({"every_n_steps": True}, "every_n_steps must be a whole number of at least 1"),
    ({"every_n_steps": None}, "every_n_steps must be a whole number of at least 1"),
    ({"write_every_n_steps": -1}, "write_every_n_steps must be a whole number of at least 1"),
    ({"rows": 0}, "rows must be a whole number of at least 1 or None"),
    ({"sequences": -4}, "sequences must be a whole number of at least 1 or None"),
    ({"top_n": None}, "top_n must be a whole number of at least 1"),
    ({"tokens": "keys"}, "tokens must be one of 'value', 'value_raw', 'hidden'"),
    ({"fd_epsilon": 0}, "fd_epsilon must be a finite number > 0"),
    ({"fd_epsilon": math.nan}, "fd_epsilon must be a finite number > 0"),
    ({"fd_epsilon": "0.1"}, "fd_epsilon must be a finite number > 0"),
    ({"metrics": ["nope"]}, "unknown metric 'nope'; accepted are: entropy, "),
    ({"metrics": "nope"}, "unknown metric 'nope'; accepted are: entropy, "),
    ({"metrics": []}, "metrics is empty"),
    ({"metrics": 7}, "metrics must be"),
    ({"include": "*.attention"}, r"matches no .* there are: .*'layers\.0'"),
    ({"exclude": "*.attention"}, r"matches no .* there are: .*'layers\.0'"),
    ({"exclude": "*"}, "leave no attention module"),
    ({"include": 3}, "include must be"),
    ({"include": [3]}, "include must be glob patterns"),
    ({"exclude": []}, "exclude must be glob patterns"),
    ({"rules": ["ceiling"]}, "rules must be instances of attnmon.rules.Rule"),
    ({"rules": 3}, "rules must be"),
    ({"rules": [attnmon.Ceiling(), attnmon.Ceiling()]}, "different names"),
    ({"writers": ["log.jsonl"]}, "writers must be attnmon.writers.Writer objects"),
    ({"writers": 3}, "writers must be"),
    ({"on_alert": "print"}, "on_alert must be callable"),
    ({"backend": "cuda"}, "'auto'.*'torch'.*'triton'"),
    ({"on_error": "ignore"}, "on_error must be one of 'warn', 'raise'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda given: str(given)[:40])
def test_a_bad_option_is_an_error_at_construction_that_says_what_is_accepted(model, options, message):
    with pytest.raises(AttnmonError, match=message):
        attnmon.watch(model, **options)


def test_what_is_no_model_or_has_no_attention_is_refused():
    with pytest.raises(AttnmonError, match="no attention"):
        attnmon.watch(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(AttnmonError, match=r"torch\.nn\.Module"):
        attnmon.watch("gpt2")


def test_watch_spells_out_every_option_with_its_default():
    parameters = inspect.signature(attnmon.watch).parameters
    assert {name: parameter.default for name, parameter in parameters.items() if name != "model"} == DEFAULTS
    assert WatchKeywords.__annotations__.keys() == DEFAULTS.keys()
    assert all(re.search(rf"^ +[a-z_, ]*\b{name}\b[a-z_, ]*: ", attnmon.watch.__doc__, re.M) for name in DEFAULTS)


def test_options_may_be_one_thing_several_or_an_iterator(model):
    keepers = Keeper(), Keeper()
    with attnmon.watch(
        model,
        metrics=(name for name in ["max_logit", "entropy"]),
        rules=(rule for rule in [attnmon.Ceiling(warning=1e-9, critical=1e9, patience=1, start_steps=1)]),
        writers=(keeper for keeper in keepers),
        include=(pattern for pattern in ["*.0"]),
    ) as monitor:
        snapshot = run(monitor, model, small_inputs())
    assert snapshot.metrics == ("entropy", "max_logit")
    assert snapshot.modules == ("layers.0",)
    assert [keeper.steps for keeper in keepers] == [[0], [0]]
    assert {alert.rule for alert in monitor.alerts} == {"ceiling"}
    single = Keeper()
    with attnmon.watch(model, metrics="entropy", rules=attnmon.NonFinite(), writers=single) as monitor:
        assert run(monitor, model, small_inputs()).metrics == ("entropy",)
    assert single.steps == [0]


# -- alerts ---------------------------------------------------------------------------------------------------


def test_alerts_go_to_list_callback_and_writers_once(model):
    keeper, told = Keeper(), []
    with attnmon.watch(model, writers=[keeper], on_alert=told.append, write_every_n_steps=100) as monitor:
        run(monitor, model, small_inputs())
        assert monitor.alerts == []
        broken = small_inputs()
        broken[0, 3] = math.nan
        for _ in range(3):
            run(monitor, model, broken)
        assert {(alert.step, alert.rule, alert.severity) for alert in told} == {(1, "non_finite", "critical")}
        assert {(alert.module, alert.head) for alert in told} == {
            (f"layers.{layer}", head) for layer in (0, 1) for head in (0, 1)
        }
        assert monitor.alerts == keeper.alerts == told
        monitor.alerts.clear()  # a copy
        assert monitor.alerts == told
    assert keeper.log == [("alerts", 4), ("snapshot", 3), "close"]


def test_a_snapshot_comes_before_its_alerts(model):
    keeper = Keeper()  # a writer draws the alert's picture from the snapshot that it has
    with attnmon.watch(model, writers=[keeper]) as monitor:
        run(monitor, model, torch.full((1, SMALL_LENGTH, SMALL_WIDTH), math.inf))
    assert keeper.log == [("snapshot", 0), ("alerts", 4), "close"]


def test_no_rules_no_alerts(model):
    with attnmon.watch(model, rules=()) as monitor:
        run(monitor, model, torch.full((1, SMALL_LENGTH, SMALL_WIDTH), math.nan))
    assert monitor.alerts == []


def hot_rules():
    return [attnmon.Ceiling(warning=1e-3, critical=1e9, patience=2, start_steps=1)]


def test_state_goes_through_torch_save_and_carries_baselines_and_open_alerts(model):
    def start():
        return attnmon.watch(model, rules=[attnmon.Ceiling(warning=1e-4, critical=1e3), attnmon.NonFinite()], rows=4)

    def continued(monitor, steps):
        return [run(monitor, model, small_inputs(seed=step)).to_dict() for step in steps]

    whole, first, second = start(), start(), start()
    everything = continued(whole, range(12))
    assert continued(first, range(6)) == everything[:6]
    told = [alert for alert in whole.alerts if alert.step < 6]
    assert first.alerts == told
    assert told, "nothing was open when the run was cut"
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second.load_state_dict(torch.load(saved, weights_only=True))
    assert continued(second, range(6, 12)) == everything[6:]  # steps and sampled rows go on, too
    assert second.alerts == [alert for alert in whole.alerts if alert.step >= 6]
    assert second.state_dict() == whole.state_dict()
    json.dumps(whole.state_dict(), allow_nan=False)


def test_without_the_state_the_alerts_would_be_told_again(model):
    for restored in (False, True):
        before, after = (attnmon.watch(model, rules=hot_rules()) for _ in range(2))
        for step in range(4):
            run(before, model, small_inputs(), step=step)
        assert before.alerts
        if restored:
            after.load_state_dict(before.state_dict())
        for step in range(4, 8):
            run(after, model, small_inputs(), step=step)
        assert bool(after.alerts) is not restored


@pytest.mark.parametrize("damage", ["version", "next_step", "next_draw", "rules", "modules", "everything", "type"])
def test_a_damaged_state_is_refused_and_changes_nothing(model, damage):
    with attnmon.watch(model, rules=hot_rules()) as monitor:
        for _ in range(3):
            run(monitor, model, small_inputs())
        before = monitor.state_dict()
        state = json.loads(json.dumps(before))
        if damage == "modules":
            del state["rules"]["modules"]
        elif damage in ("everything", "type"):
            state = {} if damage == "everything" else [state]
        else:
            del state[damage]
        with pytest.raises(AttnmonError, match="state"):
            monitor.load_state_dict(state)
        assert monitor.state_dict() == before


# -- faults ---------------------------------------------------------------------------------------------------


def broken_measure(*args, **kwargs):
    raise RuntimeError("no reduction today")


def test_a_failing_reducer_is_told_once_and_training_goes_on(model, monkeypatch):
    monkeypatch.setattr("attnmon.run.backend_choice.measure", broken_measure)
    with attnmon.watch(model) as monitor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(monitor, model, small_inputs())
    assert [str(warning.message) for warning in caught if warning.category is AttnmonWarning] == [
        "attnmon: layers.0: an attention call is not measured: RuntimeError: no reduction today; "
        "further modules of which this holds are in monitor.coverage()"
    ]
    assert model.layers[0].qkv.weight.grad is not None
    assert monitor.latest is None
    for record in monitor.coverage():
        assert (record.status, record.reason) == ("skipped", "RuntimeError: no reduction today")
        assert record.refused == {"RuntimeError: no reduction today": 3}


def test_a_reducer_that_fails_for_one_module_costs_that_module_alone(model, monkeypatch):
    real, calls = attnmon.run.backend_choice.measure, []

    def flaky(call, *args):
        calls.append(call)
        if len(calls) % 2:
            raise RuntimeError("only the first layer")
        return real(call, *args)

    monkeypatch.setattr("attnmon.run.backend_choice.measure", flaky)
    with attnmon.watch(model) as monitor:
        with pytest.warns(AttnmonWarning, match="only the first layer"):
            run(monitor, model, small_inputs())
        assert monitor.latest.modules == ("layers.1",)
        assert [record.status for record in monitor.coverage()] == ["skipped", "captured"]


def test_on_error_raise_raises_and_leaves_the_model_clean(model, monkeypatch):
    monitor = attnmon.watch(model, on_error="raise")
    with monkeypatch.context() as patch:
        patch.setattr("attnmon.run.backend_choice.measure", broken_measure)
        with pytest.raises(RuntimeError, match="no reduction today"):
            run(monitor, model, small_inputs())
    assert (hooks(model), function_modes()) == (0, [])
    assert run(monitor, model, small_inputs()).step == 0


class BrokenWriter(Writer):
    def write_snapshot(self, snapshot):
        raise OSError("disk full")


def test_a_writer_that_fails_harms_neither_training_nor_other_writers(model):
    keeper = Keeper()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attnmon.watch(model, writers=[BrokenWriter(), keeper]) as monitor:
            for _ in range(5):
                run(monitor, model, small_inputs())
    assert keeper.steps == [0, 1, 2, 3, 4]
    assert [str(warning.message)[:48] for warning in caught] == ["BrokenWriter could not write a snapshot (OSError"]
    monitor = attnmon.watch(model, writers=[BrokenWriter()], on_error="raise")
    with pytest.raises(OSError, match="disk full"):
        run(monitor, model, small_inputs())
    assert (hooks(model), function_modes()) == (0, [])


def test_a_failing_on_alert_is_told_once(model):
    def on_alert(alert):
        raise KeyError("pager")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attnmon.watch(model, on_alert=on_alert, rules=[attnmon.NonFinite(clear_steps=1)]) as monitor:
            for hidden in (math.nan, 0.0, math.nan):
                run(monitor, model, torch.full((1, SMALL_LENGTH, SMALL_WIDTH), hidden))
    assert len(monitor.alerts) == 8
    assert [str(warning.message) for warning in caught] == [
        "attnmon: a fault inside the monitor (KeyError: 'pager'); training goes on"
    ]


def test_warnings_as_errors_leave_the_model_clean(model, monkeypatch):
    monkeypatch.setattr("attnmon.run.backend_choice.measure", broken_measure)
    monitor = attnmon.watch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnmonWarning)
        with pytest.raises(AttnmonWarning):
            run(monitor, model, small_inputs())
    assert (hooks(model), function_modes()) == (0, [])
    monkeypatch.undo()
    assert run(monitor, model, small_inputs()).modules == ("layers.0", "layers.1")


def test_a_measured_step_that_captured_nothing_says_so_once(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attnmon.watch(model) as monitor:
            for _ in range(3):
                with monitor.step():
                    pass
            assert monitor.latest is None
            assert run(monitor, model, small_inputs()).step == 3
    assert len(caught) == 1
    assert "captured no attention call" in str(caught[0].message)


# -- rows that do not count -----------------------------------------------------------------------------------


def test_rows_that_are_not_finite_are_counted(model):
    hidden = small_inputs(2)
    hidden[1, 5] = math.nan  # causal: query 5 and all after it see key 5
    snapshot = attnmon_of(model, hidden)
    for path, expected in (
        ("layers.0", SMALL_LENGTH - 5),
        ("layers.1", SMALL_LENGTH),
    ):  # 0 * NaN: layer 0 spreads it to all rows
        assert snapshot.excluded[path].tolist() == [expected] * SMALL_HEADS
        assert snapshot.excluded_by_reason["nonfinite"][path].tolist() == [expected] * SMALL_HEADS
        assert snapshot.rows[path].tolist() == [2 * SMALL_LENGTH - expected] * SMALL_HEADS
        assert np.isfinite(snapshot["entropy"][path]).all()


@pytest.mark.parametrize("as_float", [False, True])
def test_fully_masked_rows_are_counted(model, as_float):
    mask = torch.ones(1, 1, SMALL_LENGTH, SMALL_LENGTH, dtype=torch.bool).tril()
    mask[..., 2:6, :] = False
    if as_float:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with attnmon.watch(model, **EVERY_ROW) as monitor:
        with monitor.step(), torch.no_grad():
            model.layers[0](small_inputs(3), mask)
        snapshot = monitor.latest
    assert snapshot.excluded_by_reason["masked"]["layers.0"].tolist() == [3 * 4] * SMALL_HEADS
    assert snapshot.excluded["layers.0"].tolist() == [3 * 4] * SMALL_HEADS
    assert snapshot.rows["layers.0"].tolist() == [3 * (SMALL_LENGTH - 4)] * SMALL_HEADS


def test_a_step_of_nothing_but_bad_rows_is_no_data(model):
    snapshot = attnmon_of(model, torch.full((2, SMALL_LENGTH, SMALL_WIDTH), math.nan))
    for metric in snapshot.metrics:
        for heads in snapshot[metric].values():
            assert np.isnan(heads).all(), metric
    assert snapshot.rows["layers.0"].tolist() == [0, 0]
    assert snapshot.excluded["layers.0"].tolist() == [2 * SMALL_LENGTH] * SMALL_HEADS


# -- the snapshot ---------------------------------------------------------------------------------------------


def test_a_snapshot_is_plain_data(model):
    hidden = small_inputs(2)
    snapshot = attnmon_of(model, hidden)
    assert set(snapshot.metrics) == set(METRICS) - {"max_logit_uncapped", "sink_mass"}
    for metric in snapshot.metrics:
        for path, heads in snapshot[metric].items():
            assert path in snapshot.modules
            assert (type(heads), heads.dtype, heads.shape) == (np.ndarray, np.float32, (SMALL_HEADS,))
    assert snapshot.rows["layers.1"].dtype == np.int64
    assert "entropy" in snapshot
    with pytest.raises(KeyError, match="no metric 'nope' in this snapshot; it has entropy"):
        snapshot["nope"]
    assert snapshot.settings == {"rows": None, "sequences": None, "top_n": 4, "tokens": "value", "fd_epsilon": 0.1}


@pytest.mark.parametrize("fill", [None, 0.0, math.nan], ids=["numbers", "infinite_temperature", "no_data"])
def test_to_dict_is_strict_json_and_from_dict_its_inverse(model, fill):
    hidden = small_inputs(2) if fill is None else torch.full((2, SMALL_LENGTH, SMALL_WIDTH), fill)
    snapshot = attnmon_of(model, hidden)
    if fill == 0.0:
        assert np.isinf(snapshot["effective_temperature"]["layers.0"]).all()
    text = json.dumps(snapshot.to_dict(), allow_nan=False)
    again = Snapshot.from_dict(json.loads(text))
    assert (again.step, again.modules, again.metrics) == (snapshot.step, snapshot.modules, snapshot.metrics)
    assert again.settings == snapshot.settings
    for metric in snapshot.metrics:
        for path, heads in snapshot[metric].items():
            assert again[metric][path].dtype == np.float32
            np.testing.assert_array_equal(again[metric][path], np.where(np.isfinite(heads), heads, np.nan))
    for path in snapshot.modules:
        np.testing.assert_array_equal(again.rows[path], snapshot.rows[path])
        np.testing.assert_array_equal(again.excluded[path], snapshot.excluded[path])
    for reason, by_path in snapshot.excluded_by_reason.items():
        for path, counts in by_path.items():
            np.testing.assert_array_equal(again.excluded_by_reason[reason][path], counts)
    assert json.dumps(again.to_dict(), allow_nan=False) == text
