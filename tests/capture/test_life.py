"""Steps, monitors and copies in any order: what is process-wide is given back, and nothing of a copy is attnmon's."""

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import attnmon
from tests.capture.weights import SeenByFunctionMode, calls, hooks
from tests.helpers import slow_but
from tests.models import KINDS, WIDTH, MhaAttention, Model, SdpaAttention, inputs

every_kind = pytest.mark.parametrize("kind", KINDS)
BUILTIN = torch.overrides.has_torch_function


def modes():
    return torch._C._len_torch_function_stack()


def assert_as_before(*models):
    assert modes() == 0
    assert [hooks(model) for model in models] == [0] * len(models)
    assert "__reduce_ex__" not in vars(nn.Module)
    assert torch.overrides.has_torch_function is BUILTIN
    assert "attnmon" not in torch.jit._script._script_impl.__code__.co_filename
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


def forward_and_backward(model, x=None):
    model(inputs() if x is None else x).sum().backward()


# -- several monitors -------------------------------------------------------------------------------------------

ORDERS = {  # A, B: steps begin; a, b: they end; x, y: the first and the second model run; C, D: monitors are closed
    "as they began": ("ABxayb", [1, 1]),
    "nested": ("ABxyba", [1, 1]),
    "one after the other": ("AxayByb", [1, 1]),
    "closed inside": ("ABxyDxa", [2, 1]),
    "closed outside": ("ABxCyb", [1, 1]),
    "ended at once": ("ABayb", [0, 1]),
    "begun again": ("AxBaAxyba", [2, 1]),
}


@pytest.mark.filterwarnings("ignore:attnmon. a measured step captured no")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["sdpa", "mha"])
def test_steps_of_two_monitors_overlap_in_any_order(kind, order):
    one, other = Model(kind, 1), Model(kind, 1)
    first, second = attnmon.watch(one), attnmon.watch(other)
    do = {
        "A": first.begin_step, "B": second.begin_step, "a": first.end_step, "b": second.end_step, "C": first.close,
        "D": second.close, "x": lambda: forward_and_backward(one), "y": lambda: forward_and_backward(other),
    }  # fmt: skip
    for letter in ORDERS[order][0]:
        do[letter]()
    assert [sum(calls(first)), sum(calls(second))] == ORDERS[order][1]
    assert_as_before(one, other)


def test_two_monitors_of_one_model():
    model = Model("eager")
    first, second = attnmon.watch(model), attnmon.watch(model)
    first.begin_step()
    second.begin_step()
    forward_and_backward(model)
    first.end_step()
    forward_and_backward(model)
    second.end_step()
    assert (calls(first), calls(second)) == ([1, 1], [2, 2])
    assert_as_before(model)


def test_a_mode_of_the_users_stays_where_it_is():
    model, mode = Model("sdpa"), SeenByFunctionMode()
    monitor = attnmon.watch(model)
    monitor.begin_step()
    mode.__enter__()
    forward_and_backward(model)
    monitor.end_step()
    assert torch.overrides._get_current_function_mode_stack() == [mode]
    mode.__exit__(None, None, None)
    assert calls(monitor) == [1, 1]
    assert_as_before(model)


def test_a_mode_that_begins_in_one_module_and_ends_in_another():
    class Odd(Model):
        def forward(self, x):
            x = self.layers[0](x)
            self.mode.__exit__(None, None, None)
            return self.layers[1](x)

    model = Odd("sdpa")
    model.mode = SeenByFunctionMode()
    model.layers[0].register_forward_pre_hook(lambda *args: model.mode.__enter__() and None)
    model(inputs())
    bare = list(model.mode.seen)
    monitor = attnmon.watch(model, on_error="raise")
    for step in range(2):
        model.mode.seen.clear()
        with monitor.step():
            model(inputs())
        assert model.mode.seen == bare
        assert modes() == 0
        assert calls(monitor) == [step + 1] * 2


def test_threads_that_train_side_by_side():
    counted = []

    def work():
        model = nn.Sequential(SdpaAttention(), MhaAttention())
        monitor = attnmon.watch(model)
        for _ in range(10):
            with monitor.step():
                forward_and_backward(model)
        counted.append((calls(monitor), modes(), hooks(model)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [([10, 10], 0, 0)] * 4
    assert_as_before()


def test_a_step_that_ends_in_another_thread():
    model = Model("sdpa")
    monitor = attnmon.watch(model)
    monitor.begin_step()
    forward_and_backward(model)
    thread = threading.Thread(target=monitor.end_step)
    thread.start()
    thread.join()
    assert calls(monitor) == [1, 1]
    with monitor.step():  # what could not be taken away from there goes now
        forward_and_backward(model)
    assert calls(monitor) == [2, 2]
    assert_as_before(model)


def test_a_mode_left_to_another_thread_tells_nothing_of_it():
    """Begun here, ended there, and the next step is there: what runs here meanwhile is not of that step."""
    model, other = Model("sdpa"), SdpaAttention()
    monitor = attnmon.watch(model, rows=None, sequences=None)
    monitor.begin_step()
    forward_and_backward(model)

    def there():
        monitor.end_step()
        monitor.begin_step()
        model.layers[0].register_forward_pre_hook(lambda *args: here())
        forward_and_backward(model)
        monitor.end_step()
        assert modes() == 0

    def here():
        waiting.set()
        assert done.wait(30)

    waiting, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=there)
    thread.start()
    assert waiting.wait(30)
    assert modes() == 1  # it is still on this thread's stack
    other(inputs(batch=7))
    done.set()
    thread.join()
    assert calls(monitor) == [2, 2]
    assert monitor.flush().rows["layers.0"].tolist() == [2 * 6] * 2
    model.layers[0]._forward_pre_hooks.clear()
    with monitor.step():
        forward_and_backward(model)
    assert calls(monitor) == [3, 3]
    assert_as_before(model)


# -- an end that never comes --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:attnmon. a step was begun while another one was open")
def test_a_step_that_was_left_open_is_not_mixed_with_the_next():
    model = Model("sdpa")
    monitor = attnmon.watch(model, rows=None, sequences=None)
    monitor.begin_step()
    forward_and_backward(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 6, 15))
    monitor.begin_step()
    forward_and_backward(model)
    monitor.end_step()
    assert monitor.flush().rows["layers.0"].tolist() == [2 * 6] * 2
    assert_as_before(model)


def test_a_monitor_that_is_dropped_lets_go_of_everything():
    import torch.nn.attention.flex_attention as flex

    function = flex.flex_attention

    class Dropping(Model):
        def forward(self, x):
            x = self.layers[0](x)
            held.clear()
            gc.collect()
            assert gone() is None
            return self.layers[1](x)

    model = Dropping("sdpa")
    held = [attnmon.watch(model)]
    gone = weakref.ref(held[0])
    held[0].begin_step()
    assert flex.flex_attention is not function
    forward_and_backward(model)
    assert flex.flex_attention is function
    assert_as_before(model)


# -- every_n_steps ------------------------------------------------------------------------------------------------


def test_each_nth_step_is_measured_whatever_its_number_and_after_a_resume():
    model = Model("sdpa", 1)

    def measured(monitor, numbers):
        seen = []
        for number in numbers:
            with monitor.step(number):
                model(inputs())
            if monitor.latest is not None and monitor.latest.step not in seen:
                seen.append(monitor.latest.step)
        return seen

    numbers = list(range(5, 5 + 3 * 40, 3))
    whole = measured(attnmon.watch(model, every_n_steps=4), numbers)
    assert whole == numbers[::4]
    for cut in (17, 18, 20):
        before, after = attnmon.watch(model, every_n_steps=4), attnmon.watch(model, every_n_steps=4)
        one = measured(before, numbers[:cut])
        after.load_state_dict(before.state_dict())
        assert one + measured(after, numbers[cut:]) == whole


# -- copies -------------------------------------------------------------------------------------------------------


class Copied(Model):
    """Copies itself in the middle of its forward."""

    inside = None

    def forward(self, x):
        x = x + self.layers[0](x)
        if Copied.inside is not None:
            Copied.inside()
        return x + self.layers[1](x)


class Own(Model):
    def __deepcopy__(self, memo):
        twin = Own.__new__(Own)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def copies_of(model):
    saved = io.BytesIO()
    torch.save(model, saved)
    pickled = pickle.dumps(model)
    for data in (pickled, saved.getvalue()):
        assert b"attnmon" not in data
    saved.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "copy": copy.copy(model).layers[0],
        "pickle": pickle.loads(pickled),
        "save": torch.load(saved, weights_only=False),
        "average": torch.optim.swa_utils.AveragedModel(model),
    }


@every_kind
@pytest.mark.parametrize("compiled", slow_but((False,), (False, True)))
def test_copies_made_anywhere_are_bare(kind, compiled):
    model, made = Copied(kind), []
    if compiled:
        torch._dynamo.reset()
        model.layers[1].compile(backend="aot_eager")
    monitor = attnmon.watch(model, on_error="raise")
    with monitor.step():
        forward_and_backward(model)
        made.append(copies_of(model))
        Copied.inside = lambda: made.append(copies_of(model))
        forward_and_backward(model)
        Copied.inside = None
    made.append(copies_of(model))
    assert len(made) == 3
    for found in made:
        found.pop("copy")  # shares its layers with the model
        assert {name: hooks(twin) for name, twin in found.items()} == dict.fromkeys(found, 0)
    assert calls(monitor) == [2, 2]
    forward_and_backward(made[1]["deepcopy"])
    torch._dynamo.reset()


def test_a_module_that_copies_itself_by_its_own_rules_takes_nothing_that_acts():
    model = Own("sdpa")
    with attnmon.watch(model) as monitor, monitor.step():
        twin = copy.deepcopy(model)
        forward_and_backward(twin)
        forward_and_backward(model)
    assert calls(monitor) == [1, 1]
    assert b"attnmon" not in pickle.dumps(twin._forward_hooks)


def test_a_saved_model_needs_no_attnmon(tmp_path):
    model, path = nn.TransformerEncoderLayer(WIDTH, 2, 32), tmp_path / "model.pt"
    with attnmon.watch(model) as monitor, monitor.step():
        forward_and_backward(model)
        torch.save(model, path)
    code = f"""
import sys; sys.modules["attnmon"] = None
import torch; torch.load({str(path)!r}, weights_only=False)(torch.zeros(3, 2, {WIDTH}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@every_kind
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_is_made_of_a_model_inside_a_step_is_as_bare(kind):
    model, x = Model(kind, 1), inputs()
    scripted = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 32), nn.Linear(WIDTH, WIDTH))
    names = re.compile(r"__torch_mangle_\d+\.|(?<=\.)_\.?(?=[A-Z])")  # torch numbers classes that it has seen before

    def make():
        return [
            str(torch.export.export(model, (x,)).graph),
            str(torch.export.export(model, (x,), strict=True).graph),
            names.sub("", str(torch.jit.script(scripted).graph)),
            names.sub("", str(torch.jit.trace(model, x, check_trace=False).inlined_graph)),
            str(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).graph),
        ]

    make()
    bare = make()
    monitor, around = attnmon.watch(model, on_error="raise"), attnmon.watch(scripted)
    with monitor.step(), around.step():
        assert make() == bare
        forward_and_backward(model)
        forward_and_backward(scripted)
    assert calls(monitor) == [1]
    assert calls(around) == [1]
    assert_as_before(model, scripted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_kind
def test_scripting_in_the_middle_of_a_forward_costs_no_call(kind):
    class Scripting(KINDS[kind]):
        def forward(self, x):
            scripted = torch.jit.script(nn.GELU())
            return super().forward(scripted(x))

    model = nn.Sequential(Scripting(), nn.Sequential(KINDS[kind]()))
    monitor = attnmon.watch(model, on_error="raise")
    for step in range(2):
        with monitor.step():
            forward_and_backward(model)
        assert calls(monitor) == [step + 1] * 2
    assert_as_before(model)


@dataclass
class Holder:
    monitor: object


def test_a_copied_monitor_is_a_closed_one():
    model = Model("sdpa")
    # neither a function nor an open file can be pickled
    monitor = attnmon.watch(model, on_alert=lambda alert: None, writers=[attnmon.writers.ConsoleWriter(sys.stdout)])
    with monitor.step():
        forward_and_backward(model)
        model.monitor = monitor
        copies = [copy.deepcopy(model).monitor, pickle.loads(pickle.dumps(Holder(monitor))).monitor]
        del model.monitor
    monitor.flush()
    copies += [copy.copy(monitor), copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))]
    copies += [copy.deepcopy(copies[-1])]
    for index, twin in enumerate(copies):
        assert twin.closed
        with twin.step():
            model(inputs())
        twin.begin_step()
        twin.pause()
        twin.resume()
        twin.end_step()
        twin.abandon_step()
        assert (twin.latest is None) == (index < 2)
        assert twin.flush() is twin.latest
        assert twin.settings == monitor.settings
        assert [record.path for record in twin.coverage()] == ["layers.0", "layers.1"]
        with pytest.raises(attnmon.AttnmonError, match="closed copy"):
            twin.load_state_dict(monitor.state_dict())
        twin.close()
    assert copies[-1].state_dict() == monitor.state_dict()
    assert calls(monitor) == [1, 1]
    assert_as_before(model)


@pytest.mark.parametrize("fitted", [False, True])
def test_a_callback_copies_too(fitted, tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    from attnmon.lightning import AttentionMonitor

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model("sdpa")

        def training_step(self, batch, index):
            return self.model(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def __reduce__(self):
            raise AssertionError("a copy of the callback takes the model along")

    callback = AttentionMonitor(every_n_steps=2, on_alert=print, writers=[attnmon.writers.JsonlWriter(tmp_path)])
    if fitted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_steps=3, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=tmp_path, accelerator="cpu",
            )  # fmt: skip
            trainer.fit(Module(), torch.utils.data.DataLoader([inputs()[0]] * 4, batch_size=2))
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert twin.state_key == callback.state_key
        assert len(twin.coverage()) == (2 if fitted else 0)
        assert (twin.latest is not None) is fitted
        assert len(twin._writers) == (0 if fitted else 1)
        if fitted:
            assert twin.monitor.closed


# -- attaching ----------------------------------------------------------------------------------------------------


def test_nothing_of_the_users_runs_when_attaching():
    class Touchy(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 4)

        @property
        def num_heads(self):
            raise RuntimeError("build() first")

        @property
        def is_cross_attention(self):
            warnings.warn("deprecated", FutureWarning, stacklevel=2)

        def __getattr__(self, name):
            if name in ("heads", "nheads", "_compiler_ctx", "is_causal"):
                raise KeyError(name)
            return super().__getattr__(name)

        def forward(self, x):
            return self.attn(x, x, x)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Touchy()
        monitor = attnmon.watch(model, on_error="raise")
        with monitor.step():
            forward_and_backward(model)
        assert calls(monitor) == [1]


def test_models_without_numbers_can_be_watched():
    with torch.device("meta"):
        on_meta = Model("mha")
    with FakeTensorMode():
        fake = Model("sdpa")
        monitors = [attnmon.watch(model) for model in (on_meta, fake)]
    for monitor in monitors:
        assert len(monitor.coverage()) > 0
    monitor = attnmon.watch(on_meta)
    on_meta.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in on_meta.parameters():
            parameter.normal_()
    with monitor.step():
        forward_and_backward(on_meta)
    assert calls(monitor) == [1, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_parts_cost_themselves_alone(recwarn):
    model = nn.Sequential(
        torch.jit.script(nn.LayerNorm(WIDTH)), SdpaAttention(), torch.jit.script(nn.Linear(WIDTH, WIDTH)),
        MhaAttention(), torch.jit.trace(nn.Linear(WIDTH, WIDTH), inputs()),
    )  # fmt: skip
    monitor = attnmon.watch(model)
    for _ in range(2):
        with monitor.step():
            forward_and_backward(model)
    assert calls(monitor) == [2, 2]
    assert not [warning for warning in recwarn if issubclass(warning.category, attnmon.AttnmonWarning)]
