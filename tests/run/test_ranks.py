"""Several ranks: what is merged equals one process over the whole batch, and no rank ever waits for another in vain.

Two gloo processes are kept for the tests of a plain loop; whatever hangs fails by the timeout of its collective.
"""

import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import attnmon
from attnmon import AttnmonError, AttnmonWarning
from tests.helpers import slow_but
from tests.models import SMALL_HEADS, SMALL_LENGTH, SmallModel, small_inputs
from tests.run.watching import EVERY_ROW, Keeper, assert_close, attnmon_of

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVE_LIMIT, ANSWER_LIMIT = 30, 90  # seconds

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step.", "ignore:.*LeafSpec"),
]


# -- two processes --------------------------------------------------------------------------------------------


def join_group(rank, store):
    limit = datetime.timedelta(seconds=COLLECTIVE_LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)


def serve(rank, store, connection):
    torch.set_num_threads(1)
    join_group(rank, store)
    while (task := connection.recv()) is not None:
        name, *arguments = task
        try:
            connection.send((True, globals()[name](rank, *arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pair:
    """Two ranks that run functions of this file."""

    def __init__(self, folder):
        self.folder, self.started, self.processes = folder, 0, []

    def start(self):
        context = torch.multiprocessing.get_context("spawn")
        store = self.folder / f"store{self.started}"
        self.started += 1
        self.connections, others = zip(*(context.Pipe() for _ in range(2)), strict=True)
        self.processes = [
            context.Process(target=serve, args=(rank, store, other), daemon=True) for rank, other in enumerate(others)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function, *arguments):
        """What ``function(rank, *arguments)`` returns on each rank."""
        if not self.processes:
            self.start()
        try:
            for connection in self.connections:
                connection.send((function.__name__, *arguments))
            answers = []
            for rank, connection in enumerate(self.connections):
                assert connection.poll(ANSWER_LIMIT), f"rank {rank} hangs"
                answers.append(connection.recv())
        except BaseException:
            self.kill()
            raise
        faults = [answer for fine, answer in answers if not fine]
        if faults:
            self.kill()  # the two may have parted
            raise AssertionError("\n".join(faults))
        return [answer for _, answer in answers]

    def stop(self):
        if self.processes:
            for connection in self.connections:
                connection.send(None)
            for process in self.processes:
                process.join(ANSWER_LIMIT)
        self.kill()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.stop()


def new_model(layers=2):
    torch.manual_seed(0)
    return SmallModel(layers)


def share(rank, sizes):
    """A rank's part of a batch whose sequences differ much, and of them the parts' sizes."""
    hidden = small_inputs(sum(sizes)) * torch.linspace(0.3, 6.0, sum(sizes))[:, None, None]
    return hidden if rank is None else hidden.split(sizes)[rank]


def step_over(monitor, model, *parts, collective=False):
    monitor.begin_step()
    for part in parts:
        model(part).square().mean().backward()
    monitor.end_step(collective=collective)


# -- a plain loop ---------------------------------------------------------------------------------------------


def train(rank, sizes, wrapped, collective, micro_batches):
    model = new_model()
    outer = DistributedDataParallel(model) if wrapped else model
    keeper = Keeper()
    snapshots = []
    with attnmon.watch(outer, writers=[keeper], **EVERY_ROW) as monitor:
        for _ in range(2):
            step_over(monitor, outer, *share(rank, sizes).chunk(micro_batches), collective=collective)
            if not collective:
                assert monitor.latest is (snapshots[-1] if snapshots else None)
                monitor.flush()
            snapshots.append(monitor.latest)
        assert monitor.flush() is snapshots[-1]
    return snapshots, keeper.log, [record.path for record in monitor.coverage()]


@pytest.mark.parametrize("collective", [False, True], ids=["flush", "every_step"])
@pytest.mark.parametrize(
    ("sizes", "wrapped", "micro_batches"),
    slow_but([((5, 1), False, 1)], [((3, 3), True, 1), ((5, 1), False, 1), ((2, 4), True, 2)]),
)
def test_merged_ranks_equal_one_process_over_the_whole_batch(pair, sizes, wrapped, micro_batches, collective):
    whole = attnmon_of(new_model(), share(None, sizes))
    (first, log, paths), (second, other_log, _) = pair(train, sizes, wrapped, collective, micro_batches)
    assert [snapshot.step for snapshot in first] == [snapshot.step for snapshot in second] == [0, 1]
    for snapshot in (*first, *second):
        assert_close(snapshot, whole, rtol=1e-6)
        assert snapshot.rows["layers.0"].tolist() == [6 * SMALL_LENGTH] * SMALL_HEADS
    for one, other in zip(first, second, strict=True):
        assert one.to_dict() == other.to_dict()
    assert paths == ["layers.0", "layers.1"]  # without "module."
    assert [entry for entry in log if entry != "flush"] == [("snapshot", 0), ("snapshot", 1), "close"]
    assert other_log == []


def layers_per_rank(rank, schedule):
    model, modules = new_model(layers=3), []
    with attnmon.watch(model, rules=(), **EVERY_ROW) as monitor:
        for step, calls in enumerate(schedule):
            monitor.begin_step()
            for layer in calls[rank]:
                model.layers[layer](share(rank, (2, 3))).sum().backward()
            monitor.end_step(collective=step % 2 == 0)
            if step % 2:
                monitor.flush()
            modules.append({path: int(rows[0]) // SMALL_LENGTH for path, rows in monitor.latest.rows.items()})
            assert monitor.latest.step == step
    return modules


@pytest.mark.filterwarnings("ignore::attnmon.AttnmonWarning")
def test_ranks_that_see_different_modules_go_on_together(pair):
    schedule = [
        ([0], [0, 1]),
        ([0, 2], [0]),  # layer 2 is new to both
        ([2], [0]),
        ([], [1]),
        ([0, 1, 2], [0, 1, 2]),
    ]
    first, second = pair(layers_per_rank, schedule)
    assert first == second == [
        {"layers.0": 5, "layers.1": 3},
        {"layers.0": 5, "layers.2": 2},
        {"layers.0": 3, "layers.2": 2},
        {"layers.1": 3},
        {"layers.0": 5, "layers.1": 5, "layers.2": 5},
    ]  # fmt: skip


STAGES = ((0, 1, 2), (3, 9, 10))


def stage(rank, collective):
    """A pipeline's stage: a rank has some layers only, under the names that they have in the whole model."""
    model = new_model(layers=11)
    kept = (*STAGES[0], *STAGES[1]) if rank is None else STAGES[rank]
    model.layers = torch.nn.ModuleDict({str(layer): model.layers[layer] for layer in kept})
    keeper = Keeper()
    with attnmon.watch(model, writers=[keeper], **EVERY_ROW) as monitor:
        for step in range(2):
            monitor.begin_step()
            for layer in model.layers.values():
                layer(small_inputs(2 + step)).sum().backward()
            monitor.end_step(collective=collective)
            monitor.flush()
        return monitor.latest, keeper.log, [record.path for record in monitor.coverage()]


@pytest.mark.parametrize("collective", [True, False])
def test_ranks_that_have_different_modules_see_the_whole_model(pair, collective):
    whole, log, _ = stage(None, False)
    (first, first_log, first_paths), (second, second_log, second_paths) = pair(stage, collective)
    assert whole.modules == first.modules == second.modules == tuple(f"layers.{n}" for n in (*STAGES[0], *STAGES[1]))
    for snapshot in (first, second):
        assert_close(snapshot, whole)
    assert [entry for entry in first_log if entry != "flush"] == [entry for entry in log if entry != "flush"]
    assert second_log == []
    assert [first_paths, second_paths] == [[f"layers.{n}" for n in own] for own in STAGES]  # coverage is a rank's own


def count_agreements(rank, steps):
    model, agreements = new_model(layers=3), []
    monitor = attnmon.watch(model, rules=(), **EVERY_ROW)
    real = dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: (agreements.append(1), real(*args, **kwargs))
    try:
        for step in range(steps):
            monitor.begin_step()
            for layer in range(3):
                if layer != step % 3:  # another layer is dropped each step
                    model.layers[layer](share(rank, (2, 3)))
            monitor.end_step(collective=True)
    finally:
        dist.all_gather_object = real
    return len(agreements)


def test_the_layout_settles(pair):
    assert pair(count_agreements, 9) == [2, 2]


def faulty_rank(rank, collective):
    model = new_model()
    real = attnmon.run.backend_choice.measure

    def broken(*args):
        raise RuntimeError("rank 1 cannot")

    rows = []
    with (
        attnmon.watch(model, rows=None, sequences=None, top_n=4) as monitor,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for step in range(3):
            attnmon.run.backend_choice.measure = broken if rank == 1 and step < 2 else real
            step_over(monitor, model, share(rank, (2, 3)), collective=collective)
            monitor.flush()
            rows.append(int(monitor.latest.rows["layers.0"][0]) // SMALL_LENGTH)
    return rows, [str(warning.message) for warning in told]


@pytest.mark.parametrize("collective", [False, True], ids=["flush", "every_step"])
def test_a_rank_whose_reducer_fails_does_not_hold_up_the_other(pair, collective):
    (rows, told), (other_rows, other_told) = pair(faulty_rank, collective)
    assert rows == other_rows == [2, 2, 5]
    assert told == []
    assert len(other_told) == 1
    assert "rank 1 cannot" in other_told[0]


def rank_without_calls(rank, as_error):
    model = new_model()
    monitor = attnmon.watch(model, **{**EVERY_ROW, "on_error": "warn"})
    outcome = contextlib.nullcontext() if rank == 0 else contextlib.suppress(AttnmonWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if as_error else "ignore", AttnmonWarning)
        with outcome:
            step_over(monitor, model, *([share(0, (2, 3))] if rank == 0 else []), collective=True)
    return monitor.latest


@pytest.mark.parametrize("as_error", [False, True], ids=["warning", "warnings_as_errors"])
def test_a_rank_that_captures_nothing_merges_all_the_same(pair, as_error):
    first, second = pair(rank_without_calls, as_error)
    assert first.to_dict() == second.to_dict()
    assert first.rows["layers.1"].tolist() == [2 * SMALL_LENGTH] * SMALL_HEADS


def rank_that_drops_a_step(rank):
    model = new_model()
    monitor = attnmon.watch(model, **EVERY_ROW)
    assert monitor.flush() is None
    with contextlib.suppress(ZeroDivisionError), monitor.step():
        model(share(rank, (2, 3)))
        if rank == 1:
            raise ZeroDivisionError
    first = monitor.flush()
    step_over(monitor, model, share(rank, (2, 3)))
    second = monitor.flush()
    return [(snapshot.step, int(snapshot.rows["layers.0"][0]) // SMALL_LENGTH) for snapshot in (first, second)]


def test_a_step_that_one_rank_dropped_does_not_hang_the_flush(pair):
    assert pair(rank_that_drops_a_step) == [[(0, 2), (1, 5)]] * 2


def hot_rank(rank):
    model, told, keeper = new_model(), [], Keeper()
    rules = [attnmon.NonFinite(), attnmon.Ceiling(warning=1.0, critical=1e6, patience=2, start_steps=1)]
    with attnmon.watch(
        model, rules=rules, on_alert=told.append, writers=[keeper], rows=None, sequences=None, top_n=4
    ) as monitor:
        for scale in (1.0, 1.0, 30.0, 30.0, float("nan")):
            step_over(monitor, model, small_inputs(2, seed=rank, scale=scale if rank == 1 else 1.0), collective=True)
    return told, monitor.alerts, keeper.alerts, monitor.state_dict()


def test_both_ranks_raise_the_same_alerts(pair):
    (told, alerts, written, state), (other_told, other_alerts, other_written, other_state) = pair(hot_rank)
    assert told == alerts == other_told == other_alerts == written
    assert {"non_finite", "ceiling"} <= {alert.rule for alert in told}
    assert other_written == []
    assert state == other_state


def close_after_the_group(rank, store):
    model, keeper = new_model(), Keeper()
    monitor = attnmon.watch(model, writers=[keeper], write_every_n_steps=10, **EVERY_ROW)
    step_over(monitor, model, share(rank, (2, 3)), collective=True)
    dist.destroy_process_group()
    monitor.close()
    join_group(rank, store)
    return keeper.log


def test_rank_0_alone_writes_even_when_the_group_is_gone(pair, tmp_path):
    assert pair(close_after_the_group, tmp_path / "store") == [[("snapshot", 0), "close"], []]


def never_flushed(rank):
    model, keeper = new_model(), Keeper()
    monitor = attnmon.watch(model, writers=[keeper], **EVERY_ROW)
    step_over(monitor, model, share(rank, (2, 3)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitor.close()
    return keeper.steps, [str(warning.message) for warning in told]


def test_a_loop_that_never_flushed_is_told_so(pair):
    for steps, told in pair(never_flushed):
        assert steps == []
        assert len(told) == 1
        assert "every rank has to call monitor.flush()" in told[0]


def groups(rank):
    model, sizes = new_model(), (2, 3)
    rows = []
    alone = [dist.new_group([member]) for member in range(2)][rank]
    for group in (None, dist.new_group(), alone):
        with attnmon.watch(model, process_group=group, **EVERY_ROW) as monitor:
            step_over(monitor, model, share(rank, sizes))
            rows.append(int(monitor.flush().rows["layers.0"][0]) // SMALL_LENGTH)
    return rows


def test_a_process_group_of_ones_own(pair):
    assert pair(groups) == [[5, 5, 2], [5, 5, 3]]


def sampled_steps(rank):
    model = new_model()
    with attnmon.watch(model, every_n_steps=3, **EVERY_ROW) as monitor:
        steps = []
        for _ in range(5):
            step_over(monitor, model, share(rank, (2, 3)))
            steps.append(monitor.flush().step)
    return steps


def test_steps_that_are_not_measured_cost_no_deadlock(pair):
    assert pair(sampled_steps) == [[0, 0, 0, 3, 3]] * 2


@pytest.mark.slow
def test_the_harness_tells_a_hang_from_an_answer(pair):
    with pytest.raises(AssertionError, match="AttnmonError"):
        pair(refuse)
    assert pair(sampled_steps) == [[0, 0, 0, 3, 3]] * 2  # a new pair


def refuse(rank):
    raise AttnmonError("no")


# -- Lightning ------------------------------------------------------------------------------------------------


def lightning_fit(package, root, devices, accumulate):
    """Four batches of four sequences, divided among the ranks."""
    from attnmon.lightning import AttentionMonitor
    from tests.lightning_runs import Keeper, loader, module_of, trainer_of

    torch.set_num_threads(1)
    lightning = importlib.import_module(package)
    keeper, seen = Keeper(), []
    callback = AttentionMonitor(
        rows=None, sequences=None, top_n=4, on_error="raise", writers=[keeper],
        rules=[attnmon.Ceiling(warning=1e-3, critical=1e6, patience=2, start_steps=1)],
    )  # fmt: skip

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *args):
            if callback.latest is not None and (not seen or seen[-1]["step"] != callback.latest.step):
                seen.append(callback.latest.to_dict())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)  # the same weights at every step, however gradients round

    def training_step(self, batch, batch_idx):
        return self.net(batch.chunk(self.trainer.world_size)[self.global_rank]).square().mean()

    trainer = trainer_of(
        lightning, root, [callback, Watch()], devices=devices, strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=accumulate, use_distributed_sampler=False,
    )  # fmt: skip
    module = module_of(lightning, configure_optimizers=configure_optimizers, training_step=training_step)
    trainer.fit(module, loader(4, batch_size=4))
    found = {
        "snapshots": seen, "alerts": [alert.to_dict() for alert in callback.alerts], "written": keeper.steps,
        "calls": [record.calls for record in callback.coverage()], "world": trainer.world_size,
    }  # fmt: skip
    (Path(root) / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


SCRIPT = """
from tests.run.test_ranks import lightning_fit
if __name__ == "__main__":
    lightning_fit({package!r}, {root!r}, 2, {accumulate})
"""


def run_two_ranks(folder, package, accumulate):
    script = folder / "fit.py"
    script.write_text(SCRIPT.format(package=package, root=str(folder), accumulate=accumulate))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=ANSWER_LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks are in its session
    assert process.returncode == 0, output


@pytest.mark.parametrize(("package", "accumulate"), [("pytorch_lightning", 2), ("lightning.pytorch", 1)])
@pytest.mark.slow
def test_lightning_ddp_equals_one_process(tmp_path, package, accumulate):
    pytest.importorskip(package)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    lightning_fit(package, str(tmp_path / "one"), 1, accumulate)
    run_two_ranks(tmp_path / "two", package, accumulate)
    whole, first, second = (
        json.loads((tmp_path / name).read_text()) for name in ("one/rank0.json", "two/rank0.json", "two/rank1.json")
    )
    assert first["world"] == second["world"] == 2
    assert first["snapshots"] == second["snapshots"]
    assert first["alerts"] == second["alerts"]
    assert [(alert["step"], alert["head"]) for alert in first["alerts"]] == [(0, 0), (0, 1)]
    assert [alert["step"] for alert in whole["alerts"]] == [0, 0]
    assert second["written"] == []
    steps = first["written"]
    assert steps == list(range(len(steps)))
    assert len(steps) == 4 // accumulate
    assert first["calls"] == second["calls"] == [4]
    for merged, single in zip(first["snapshots"], whole["snapshots"], strict=True):
        assert merged["step"] == single["step"]
        assert merged["modules"] == single["modules"] == ["net"]
        assert merged["rows"] == single["rows"]
        for metric, by_path in single["values"].items():
            np.testing.assert_allclose(merged["values"][metric]["net"], by_path["net"], rtol=1e-6, atol=1e-7)
    lines = (tmp_path / "two" / "attnmon.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"kind":"snapshot"' in line] == steps
