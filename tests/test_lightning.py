"""The Lightning callback, with both packages that Lightning is installed under."""

import contextlib
import gc
import importlib
import json
import math
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack as function_modes

import attnmon
from attnmon import AttnmonError, AttnmonWarning
from attnmon.writers import read_jsonl
from tests.lightning_runs import LENGTH, WIDTH, Attention, Keeper, loader, module_of, trainer_of

pytest.importorskip("pytorch_lightning")
events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

from attnmon.lightning import AttentionMonitor  # noqa: E402  after the skip
from tests.helpers import slow_but  # noqa: E402

TAG = "attnmon/entropy_norm/mean"
SMALL = {"metrics": ["entropy", "entropy_norm", "max_logit", "logit_std", "effective_temperature"]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*log_every_n_steps"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step."),
    pytest.mark.filterwarnings("ignore:predict returned None"),
    pytest.mark.filterwarnings("ignore:.*training_step. returned .None"),
]


@pytest.fixture(params=slow_but(("pytorch_lightning",), ["pytorch_lightning", "lightning.pytorch"]))
def lightning(request):
    return pytest.importorskip(request.param)


def tensorboard(lightning, root):
    return importlib.import_module(f"{lightning.__name__}.loggers").TensorBoardLogger(root, name="tb", version=0)


def read(root):
    accumulator = events.EventAccumulator(str(root / "tb" / "version_0"), size_guidance={"scalars": 0, "images": 0})
    return accumulator.Reload()


def steps_of(root, tag=TAG):
    return [event.step for event in read(root).Scalars(tag)]


def is_clean(module):
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())
    return hooks == 0 and function_modes() == []


# -- points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "batches", "points"), [(1, 6, 6), (2, 8, 4), (3, 8, 3)])
def test_one_point_an_optimizer_step_on_the_axis_of_the_loss(lightning, tmp_path, accumulate, batches, points):
    callback = AttentionMonitor(rows=None, sequences=None)
    trainer = trainer_of(
        lightning, tmp_path, callback, logger=tensorboard(lightning, tmp_path), accumulate_grad_batches=accumulate,
        max_epochs=2,
    )  # fmt: skip
    trainer.fit(module_of(lightning), loader(batches))
    assert trainer.global_step == 2 * points
    assert steps_of(tmp_path) == list(range(2 * points))
    # under accumulation Lightning logs the loss at the last micro-batch of a step, at that step's number
    assert sorted(set(steps_of(tmp_path, "loss"))) == steps_of(tmp_path)
    # the last step of an epoch has what is left over
    rows = [event.value for event in read(tmp_path).Scalars("attnmon/rows/total")]
    sizes = [min(accumulate, batches - first) for first in range(0, batches, accumulate)]
    assert rows == [size * 2 * LENGTH * 2 for size in sizes] * 2
    assert callback.latest.modules == ("net",)
    assert callback.monitor.closed


@pytest.mark.parametrize(
    ("trainers", "own", "every", "written"),
    [
        (4, None, 1, [3, 7, 9]),
        (50, None, 1, [9]),
        (4, 2, 1, [1, 3, 5, 7, 9]),
        (1, None, 3, [0, 3, 6, 9]),
        (4, None, 3, [0, 3, 9]),
        (0, None, 1, [9]),
    ],
)
def test_how_often_snapshots_are_written(lightning, tmp_path, trainers, own, every, written):
    callback = AttentionMonitor(log_every_n_steps=own, every_n_steps=every, **SMALL)
    logger = tensorboard(lightning, tmp_path)
    trainer_of(lightning, tmp_path, callback, logger=logger, log_every_n_steps=trainers).fit(
        module_of(lightning), loader(10)
    )
    assert steps_of(tmp_path) == written  # the last measured step is always there
    assert callback.coverage()[0].calls == len(range(0, 10, every))
    if trainers and own is None and every == 1:
        losses = steps_of(tmp_path, "loss") if trainers <= 10 else []
        assert losses == [step for step in written if (step + 1) % trainers == 0]


def test_only_training_is_measured(lightning, tmp_path):
    net, forwards = Attention(), []
    net.register_forward_hook(lambda *_: forwards.append(1))
    module, callback = module_of(lightning, net), AttentionMonitor(**SMALL)
    trainer = trainer_of(lightning, tmp_path, [callback], num_sanity_val_steps=2, val_check_interval=2, max_epochs=2)
    trainer.fit(module, loader(4), loader(3))
    assert len(forwards) == 2 + 2 * (4 + 2 * 3)
    assert callback.coverage()[0].calls == 8
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, loader(3), **({} if run == trainer.predict else {"verbose": False}))
    assert len(forwards) == 22 + 9
    assert callback.coverage()[0].calls == 8


class Runs:
    """Runs the model in the hook that it is made for."""

    def __init__(self, hook):
        def run(self, trainer, pl_module, *args):
            with torch.no_grad():
                pl_module.net(torch.zeros(1, LENGTH, WIDTH))

        self.hook, self.run = hook, run

    def callback(self, lightning):
        return type("Other", (lightning.Callback,), {self.hook: self.run})()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_train_end"])
def test_what_other_callbacks_run_is_not_measured(lightning, tmp_path, hook, accumulate):
    callback, other = AttentionMonitor(rows=None, sequences=None, **SMALL), Runs(hook).callback(lightning)
    trainer = trainer_of(lightning, tmp_path, [other, callback], accumulate_grad_batches=accumulate)
    trainer.fit(module_of(lightning), loader(4), loader(1))
    assert callback.coverage()[0].calls == 4
    assert callback.latest.rows["net"].tolist() == [accumulate * 2 * LENGTH] * 2


# -- where records go -----------------------------------------------------------------------------------------


def mock_logger(lightning):
    loggers = importlib.import_module(f"{lightning.__name__}.loggers.logger")

    class Mock(loggers.Logger):  # as people write them: without ``experiment``
        name, version = "mock", 0

        def __init__(self):
            super().__init__()
            self.metrics, self.images, self.texts = [], [], []

        def log_hyperparams(self, *args, **kwargs):
            pass

        def log_metrics(self, metrics, step=None):
            if TAG in metrics:
                self.metrics.append((step, metrics[TAG]))

        def log_image(self, key, images, step=None, **kwargs):
            self.images.append((step, key))

        def log_text(self, key, columns=None, data=None, step=None, **kwargs):
            self.texts.append((step, key, data[0][0]))

    return Mock()


def hot_rule(**options):
    return attnmon.Ceiling(**{"warning": 1e-4, "critical": 1e6, "patience": 1, "start_steps": 1, **options})


def test_every_logger_gets_what_it_can_show(lightning, tmp_path, capsys):
    loggers = importlib.import_module(f"{lightning.__name__}.loggers")
    mock, csv = mock_logger(lightning), loggers.CSVLogger(tmp_path, name="csv", version=0)
    keeper = Keeper()
    callback = AttentionMonitor(rules=[hot_rule()], writers=keeper, **SMALL)
    trainer = trainer_of(lightning, tmp_path, callback, logger=[tensorboard(lightning, tmp_path), csv, mock])
    trainer.fit(module_of(lightning), loader(3))
    points = [(event.step, pytest.approx(event.value)) for event in read(tmp_path).Scalars(TAG)]
    assert [step for step, _ in points] == keeper.steps == [0, 1, 2]
    assert mock.metrics == points
    lines = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    column, step = lines[0].split(",").index(TAG), lines[0].split(",").index("step")
    table = [line.split(",") for line in lines[1:]]
    assert [(int(row[step]), float(row[column])) for row in table if row[column]] == points
    assert {key for _, key in mock.images} == {f"attnmon/heads/{metric}" for metric in SMALL["metrics"]}
    assert set(read(tmp_path).Tags()["images"]) == {key for _, key in mock.images}
    assert callback.alerts
    assert mock.texts[0][:2] == (0, "attnmon/alerts")
    assert "`net`" in mock.texts[0][2]
    assert "attnmon/alerts" in read(tmp_path).Tags()["tensors"]
    assert keeper.alerts == callback.alerts
    assert "[attnmon] step 0 INFO ceiling: net head 0" in capsys.readouterr().err
    assert not (tmp_path / "attnmon.jsonl").exists()


def test_without_a_logger_records_go_to_a_file_and_alerts_to_the_console(lightning, tmp_path, capsys):
    callback = AttentionMonitor(rules=[hot_rule()], **SMALL)
    trainer_of(lightning, tmp_path, callback, log_every_n_steps=2).fit(module_of(lightning), loader(4))
    records = list(read_jsonl(tmp_path / "attnmon.jsonl"))
    assert [record.step for record in records if isinstance(record, attnmon.Snapshot)] == [1, 3]
    alerts = [record for record in records if isinstance(record, attnmon.Alert)]
    assert [(alert.rule, alert.head) for alert in alerts] == [(alert.rule, alert.head) for alert in callback.alerts]
    assert alerts
    assert "net head 1" in capsys.readouterr().err


@pytest.mark.parametrize("with_logger", [True, False])
def test_a_fast_dev_run_works_and_writes_nothing(lightning, tmp_path, monkeypatch, with_logger):
    monkeypatch.chdir(tmp_path)
    callback = AttentionMonitor(**SMALL)
    trainer_of(lightning, tmp_path, callback, fast_dev_run=2, logger=with_logger).fit(module_of(lightning), loader(4))
    assert callback.latest.step == 1
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_fails_does_not_end_the_fit(lightning, tmp_path):
    broken, keeper = mock_logger(lightning), Keeper()

    def log_metrics(metrics, step=None):
        if TAG in metrics:
            raise ConnectionError("offline")

    broken.log_metrics = log_metrics
    callback = AttentionMonitor(writers=[keeper], **SMALL)
    with pytest.warns(AttnmonWarning, match="offline"):
        trainer_of(lightning, tmp_path, callback, logger=broken).fit(module_of(lightning), loader(5))
    assert keeper.steps == [0, 1, 2, 3, 4]


# -- kinds of training ----------------------------------------------------------------------------------------


def test_manual_optimization_with_two_optimizers(lightning, tmp_path):
    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.01) for parameter in self.net.parameters()]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.net(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    module = module_of(lightning, training_step=training_step, configure_optimizers=configure_optimizers)
    module.automatic_optimization = False
    callback = AttentionMonitor(rows=None, sequences=None, **SMALL)
    trainer = trainer_of(lightning, tmp_path, callback, logger=tensorboard(lightning, tmp_path))
    trainer.fit(module, loader(4))
    assert trainer.global_step == 8  # Lightning counts each optimizer
    assert steps_of(tmp_path) == steps_of(tmp_path, "loss") == [0, 1, 2, 3]
    assert callback.coverage()[0].calls == 8
    assert callback.latest.rows["net"].tolist() == [2 * 2 * LENGTH] * 2  # both forwards


def test_manual_optimization_with_its_own_accumulation(lightning, tmp_path):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.net(batch).square().mean())
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    module = module_of(lightning, training_step=training_step)
    module.automatic_optimization = False
    keeper = Keeper()
    callback = AttentionMonitor(rows=None, sequences=None, writers=[keeper], log_every_n_steps=4, **SMALL)
    trainer_of(lightning, tmp_path, callback).fit(module, loader(12), loader(1))
    assert callback.coverage()[0].calls == 12
    assert len(keeper.steps) >= 2, "every step has an even number; none of them may be missed for that"
    assert {snapshot.rows["net"].tolist()[0] for snapshot in keeper.snapshots} == {2 * 2 * LENGTH}


def test_a_training_step_without_a_loss_is_a_step_all_the_same(lightning, tmp_path):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        return None if batch_idx == 1 else loss

    keeper = Keeper()
    callback = AttentionMonitor(writers=[keeper], **SMALL)
    trainer = trainer_of(lightning, tmp_path, [Runs("on_train_batch_end").callback(lightning), callback])
    trainer.fit(module_of(lightning, training_step=training_step), loader(4))
    assert keeper.steps == [0, 1, 2, 3]
    assert callback.coverage()[0].calls == 4


def test_an_epoch_cut_short_by_a_hook_is_not_measured_beyond(lightning, tmp_path):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None

    callback = AttentionMonitor(rows=None, sequences=None, **SMALL)
    other = Runs("on_train_epoch_end").callback(lightning)
    trainer = trainer_of(lightning, tmp_path, [callback, other], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module_of(lightning, on_train_batch_start=on_train_batch_start), loader(4), loader(2))
    assert callback.coverage()[0].calls == 4
    assert callback.latest.rows["net"].tolist() == [2 * LENGTH] * 2


@pytest.mark.parametrize("limits", [{"limit_train_batches": 3}, {"max_steps": 3, "max_epochs": -1}])
def test_limits_of_the_trainer(lightning, tmp_path, limits):
    keeper = Keeper()
    callback = AttentionMonitor(writers=[keeper], **SMALL)
    trainer_of(lightning, tmp_path, callback, **limits).fit(module_of(lightning), loader(8))
    assert keeper.steps == [0, 1, 2]
    assert callback.coverage()[0].calls == 3


def test_mixed_precision_sees_what_training_sees(lightning, tmp_path):
    dtypes = []

    def training_step(self, batch, batch_idx):
        dtypes.append(self.net.qkv(batch).dtype)
        return self.net(batch).square().mean()

    callback = AttentionMonitor(on_error="raise", **SMALL)
    trainer_of(lightning, tmp_path, callback, precision="bf16-mixed").fit(
        module_of(lightning, training_step=training_step), loader(2)
    )
    assert dtypes == [torch.bfloat16] * 2
    assert all(math.isfinite(value) for value in callback.latest["entropy"]["net"])


# -- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["nope"]}, "unknown metric 'nope'; accepted are: entropy"),
        ({"metrcs": ["entropy"]}, "unknown option 'metrcs'; accepted are: .*log_every_n_steps, metrics"),
        ({"model": None}, "unknown option 'model'"),
        ({"log_every_n_steps": 0}, "log_every_n_steps must be a whole number of at least 1 or None"),
        ({"write_every_n_steps": 2}, "called log_every_n_steps"),
        ({"every_n_steps": -1}, "every_n_steps must be a whole number of at least 1"),
        ({"backend": "cuda"}, "'auto'"),
        ({"on_error": "ignore"}, "'warn', 'raise'"),
        ({"writers": ["log"]}, "writers must be"),
        ({"rules": ["growth"]}, "rules must be"),
        ({"include": 5}, "include must be"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(AttnmonError, match=message):
        AttentionMonitor(**options)


def test_options_that_run_once_serve_two_fits(lightning, tmp_path):
    callback = AttentionMonitor(
        metrics=(name for name in ["entropy"]), rules=(rule for rule in [hot_rule()]), include=(p for p in ["net"]),
        writers=(keeper for keeper in [Keeper()]),
    )  # fmt: skip
    for _ in range(2):
        trainer_of(lightning, tmp_path, callback).fit(module_of(lightning), loader(2))
        assert callback.latest.metrics == ("entropy",)


def test_before_fitting_there_is_nothing():
    callback = AttentionMonitor()
    assert (callback.latest, callback.alerts, callback.coverage(), callback.state_dict()) == (None, [], [], {})
    with pytest.raises(AttnmonError, match="before fitting"):
        callback.monitor  # noqa: B018


def test_a_model_without_attention_is_refused_when_fitting_starts(lightning, tmp_path):
    module = module_of(lightning, nn.Linear(WIDTH, WIDTH))
    with pytest.raises(AttnmonError, match="no attention"):
        trainer_of(lightning, tmp_path, AttentionMonitor()).fit(module, loader(2))
    assert is_clean(module)
    trainer_of(lightning, tmp_path).fit(module, loader(2))


def test_one_callback_is_of_both_packages():
    import lightning.pytorch
    import pytorch_lightning

    assert issubclass(AttentionMonitor, pytorch_lightning.Callback)
    assert issubclass(AttentionMonitor, lightning.pytorch.Callback)


# -- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_training_leaves_the_model_as_it_was(lightning, tmp_path, error):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if batch_idx == 2:
            raise error
        return loss

    keeper = Keeper()
    module = module_of(lightning, training_step=training_step)
    callback = AttentionMonitor(writers=[keeper], **SMALL)
    with contextlib.suppress(error, SystemExit):
        trainer_of(lightning, tmp_path, callback).fit(module, loader(4))
    assert is_clean(module)
    assert callback.monitor.closed
    assert keeper.steps == [0, 1]


def test_a_broken_reducer_does_not_end_the_fit(lightning, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no reduction today")

    monkeypatch.setattr("attnmon.run.backend_choice.measure", broken)
    callback = AttentionMonitor(**SMALL)
    trainer = trainer_of(lightning, tmp_path, callback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module_of(lightning), loader(3))
    assert trainer.global_step == 3
    assert len([warning for warning in caught if warning.category is AttnmonWarning]) == 1
    assert callback.coverage()[0].reason == "RuntimeError: no reduction today"
    callback = AttentionMonitor(on_error="raise", **SMALL)
    with pytest.raises(RuntimeError, match="no reduction today"):
        trainer_of(lightning, tmp_path, callback).fit(module_of(lightning), loader(3))


# -- a second fit, a resumed one ------------------------------------------------------------------------------


def test_a_second_fit_of_the_same_model_goes_on_where_the_first_left_off(lightning, tmp_path):
    module, callback = module_of(lightning), AttentionMonitor(rules=[hot_rule(patience=2)], **SMALL)
    trainer_of(lightning, tmp_path, callback).fit(module, loader(4))
    first, monitor = callback.alerts, callback.monitor
    assert {alert.head for alert in first} == {0, 1}
    trainer_of(lightning, tmp_path, callback).fit(module, loader(4))
    assert callback.monitor is not monitor
    assert callback.latest.step == 3
    assert callback.alerts == []  # told in the first fit
    assert is_clean(module)


def test_a_fit_of_another_model_starts_afresh(lightning, tmp_path):
    callback = AttentionMonitor(rules=[hot_rule(patience=2)], **SMALL)
    for _ in range(2):
        module = module_of(lightning)
        trainer_of(lightning, tmp_path, callback).fit(module, loader(4))
        assert {alert.head for alert in callback.alerts} == {0, 1}
        assert is_clean(module)


def test_the_callback_does_not_keep_the_model_alive(lightning, tmp_path):
    callback = AttentionMonitor(**SMALL)
    module = module_of(lightning)
    gone = weakref.ref(module)
    trainer = trainer_of(lightning, tmp_path, callback)
    trainer.fit(module, loader(2))
    del module, trainer
    del callback.log, callback.log_dict  # methods of the module that Lightning hangs on every callback
    gc.collect()
    assert gone() is None
    assert callback.latest.step == 1


def fit_in_two(lightning, root, first, second, damage=None):
    """Two epochs, the second one resumed from a checkpoint of the first by another callback."""
    trainer = trainer_of(lightning, root, first)
    trainer.fit(module_of(lightning), loader(4))
    path = root / "first.ckpt"
    trainer.save_checkpoint(path)
    if damage is not None:
        checkpoint = torch.load(path, weights_only=False)
        damage(checkpoint)
        torch.save(checkpoint, path)
    resumed = trainer_of(lightning, root, second, max_epochs=2)
    resumed.fit(module_of(lightning), loader(4), ckpt_path=path)
    assert resumed.global_step == 8


def test_a_resumed_fit_equals_one_that_was_not_cut(lightning, tmp_path):
    def callback():
        return AttentionMonitor(rules=[hot_rule(patience=3), attnmon.NonFinite()], writers=[Keeper()], rows=4, **SMALL)

    whole, first, second = callback(), callback(), callback()
    trainer_of(lightning, tmp_path, whole, max_epochs=2).fit(module_of(lightning), loader(4))
    fit_in_two(lightning, tmp_path, first, second)
    assert first.alerts == [alert for alert in whole.alerts if alert.step < 4]
    assert first.alerts
    assert second.alerts == [alert for alert in whole.alerts if alert.step >= 4] == []
    [whole_keeper], [first_keeper], [second_keeper] = whole._writers, first._writers, second._writers
    assert [snapshot.to_dict() for snapshot in (*first_keeper.snapshots, *second_keeper.snapshots)] == [
        snapshot.to_dict() for snapshot in whole_keeper.snapshots
    ]


def _only_key(checkpoint):
    [key] = [key for key in checkpoint["callbacks"] if key.startswith("AttentionMonitor")]
    return key


def _without(checkpoint):
    checkpoint["callbacks"].pop(_only_key(checkpoint))


def _other_version(checkpoint):
    checkpoint["callbacks"][_only_key(checkpoint)]["version"] = 99


def _half(checkpoint):
    del checkpoint["callbacks"][_only_key(checkpoint)]["rules"]


def _nonsense(checkpoint):
    checkpoint["callbacks"][_only_key(checkpoint)] = {"version": 1, "next_step": "four", "rules": [1, 2]}


@pytest.mark.parametrize("damage", [_without, _other_version, _half, _nonsense])
def test_a_checkpoint_without_a_good_state_does_not_fail_the_resume(lightning, tmp_path, damage):
    first, second = (AttentionMonitor(rules=[hot_rule(patience=2)], **SMALL) for _ in range(2))
    expected = contextlib.nullcontext() if damage is _without else pytest.warns(AttnmonWarning, match="starts afresh")
    with expected:
        fit_in_two(lightning, tmp_path, first, second, damage)
    assert second.latest.step == 7
    assert {alert.head for alert in second.alerts} == {0, 1}  # told again: nothing was known


def test_a_checkpoint_of_the_callback_loads_with_weights_only_and_has_the_models_own_keys(lightning, tmp_path):
    module = module_of(lightning)
    keys = list(module.state_dict())
    callback = AttentionMonitor(rules=[hot_rule()], **SMALL)
    trainer = trainer_of(lightning, tmp_path, callback)
    trainer.fit(module, loader(3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert list(checkpoint["state_dict"]) == keys
    state = checkpoint["callbacks"][callback.state_key]
    assert state["next_step"] == 3
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_the_state_key_tells_options_apart_and_stays():
    def hot(patience):
        return [hot_rule(patience=patience)]

    assert AttentionMonitor().state_key == "AttentionMonitor"
    assert AttentionMonitor(every_n_steps=1, metrics=None, backend="torch").state_key == "AttentionMonitor"
    assert AttentionMonitor(rows=None, include="net*").state_key == (
        "AttentionMonitor{'rows': None, 'include': ('net*',)}"
    )
    assert AttentionMonitor(rules=hot(2)).state_key == AttentionMonitor(rules=iter(hot(2))).state_key
    options = [{}, {"every_n_steps": 2}, {"tokens": "hidden"}, {"exclude": "*.1"}, {"rules": hot(2)}, {"rules": hot(3)}]
    assert len({AttentionMonitor(**each).state_key for each in options}) == len(options)


def test_two_monitors_of_one_trainer_keep_their_own_states(lightning, tmp_path):
    def two():
        return [AttentionMonitor(rules=[hot_rule(patience=n)], writers=[Keeper()], **SMALL) for n in (1, 3)]

    whole, first, second = two(), two(), two()
    trainer_of(lightning, tmp_path, whole, max_epochs=2).fit(module_of(lightning), loader(4))
    fit_in_two(lightning, tmp_path, first, second)
    states = torch.load(tmp_path / "first.ckpt", weights_only=True)["callbacks"]
    assert set(states) == {callback.state_key for callback in first}
    for one, before, after in zip(whole, first, second, strict=True):
        assert before.alerts
        assert before.alerts + after.alerts == one.alerts  # an open alert is not told of again
        assert after.state_dict() == one.state_dict()


def _key_of_older_versions(checkpoint):
    checkpoint["callbacks"]["AttentionMonitor"] = checkpoint["callbacks"].pop(_only_key(checkpoint))


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.parametrize("damage", [_key_of_older_versions, None])
def test_an_only_monitor_takes_up_a_state_under_another_key(lightning, tmp_path, damage):
    first = AttentionMonitor(rules=[hot_rule(patience=2)], **SMALL)
    second = AttentionMonitor(rules=[hot_rule(patience=2)], rows=None if damage is None else 32, **SMALL)
    fit_in_two(lightning, tmp_path, first, second, damage)
    assert first.alerts
    assert second.alerts == []  # they are open still
    assert second.state_dict()["next_step"] == 8


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_of_two_monitors_none_takes_up_a_state_under_another_key(lightning, tmp_path):
    first = AttentionMonitor(rules=[hot_rule(patience=2)], **SMALL)
    second = [AttentionMonitor(rules=[hot_rule(patience=n)], **SMALL) for n in (1, 2)]
    fit_in_two(lightning, tmp_path, first, second, _key_of_older_versions)
    assert all(callback.alerts for callback in second)


def test_a_checkpoint_saved_before_fitting_keeps_a_loaded_state():
    callback = AttentionMonitor()
    callback.load_state_dict({"version": 1, "next_step": 3})
    assert callback.state_dict() == {"version": 1, "next_step": 3}
