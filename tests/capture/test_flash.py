"""Models that call the functions of flash_attn themselves; a package written out in Python takes its place."""

import functools
import gc
import sys
import types
import weakref

import pytest
import torch

import attnmon
from attnmon.capture.patching.links import ORIGINALS
from attnmon.capture.patching.replacement import Replacement
from tests.capture.flash_kernel import Kernel
from tests.capture.weights import EVERYTHING, assert_heads, entropy, watched
from tests.helpers import slow_but

pytestmark = pytest.mark.filterwarnings("ignore::attnmon.AttnmonWarning")

HEADS, KV_HEADS, DIM = 4, 2, 8
FUNCTIONS = (
    *("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"),
    *("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"),
)

MODEL = """
import functools
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func as packed, flash_attn_kvpacked_func
from flash_attn import flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func
import torch
from torch import nn

causal_func = functools.partial(flash_attn_func, causal=True)
TABLE = {"flash": flash_attn_func, "other": None}

class FlashAttention(nn.Module):
    static = staticmethod(flash_attn_func)

    def __init__(self, how, **options):
        super().__init__()
        self.how, self.options = how, options
        self.held = flash_attn_func
        self.q, self.k, self.v = (nn.Linear(16, heads * 8) for heads in (4, 2, 2))
        self.same = nn.Linear(16, 3 * 4 * 8)

    def forward(self, x, source=None, bounds=None, bounds_k=None):
        source = x if source is None else source
        q = self.q(x).view(*x.shape[:2], 4, 8)
        k, v = (layer(source).view(*source.shape[:2], 2, 8) for layer in (self.k, self.v))
        qkv = self.same(x).view(*x.shape[:2], 3, 4, 8)
        bounds_k, options = bounds if bounds_k is None else bounds_k, self.options
        if self.how == "global":
            return flash_attn_func(q, k, v, **options)
        if self.how == "attribute":
            return flash_attn.flash_attn_func(q, k, v, **options)
        if self.how == "positional":
            return flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 0))
        if self.how == "local":
            from flash_attn import flash_attn_func as local
            return local(q=q, k=k, v=v, **options)
        if self.how == "static":
            return self.static(q, k, v, **options)
        if self.how == "held":
            return self.held(q, k, v, **options)
        if self.how == "partial":
            return causal_func(q, k, v, **options)
        if self.how == "table":
            return TABLE["flash"](q, k, v, **options)
        if self.how == "qkvpacked":
            return packed(qkv, **options)
        if self.how == "kvpacked":
            return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)
        q, k, v, qkv = (tensor.flatten(0, 1) for tensor in (q, k, v, qkv))
        if self.how == "varlen":
            return flash_attn_varlen_func(q, k, v, bounds, bounds_k, 8, 8, **options)
        if self.how == "varlen_qkvpacked":
            return flash_attn_varlen_qkvpacked_func(qkv, bounds, 8, **options)
        if self.how == "varlen_kvpacked":
            return flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), bounds, bounds_k, 8, 8, **options)

class Model(nn.Module):
    def __init__(self, how="global", **options):
        super().__init__()
        torch.manual_seed(0)
        self.attn = FlashAttention(how, **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.25)

    def forward(self, *args, **kwargs):
        return self.attn(*args, **kwargs).flatten(-2)
"""


def as_function(method):
    """A plain function, as the package has, with the method's signature."""

    @functools.wraps(method)
    def function(*args, **kwargs):
        return method(*args, **kwargs)

    return function


@pytest.fixture
def package(monkeypatch):
    """(kernel, module of the model): ``flash_attn`` and a module that imports from it, both gone afterwards."""
    kernel = Kernel()
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.__path__ = []
    for name in FUNCTIONS:
        function = as_function(getattr(kernel, name))
        setattr(interface, name, function)
        setattr(flash_attn, name, function)
    module = types.ModuleType("model_over_flash_attn")
    for each in (flash_attn, interface, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    exec(compile(MODEL, "model_over_flash_attn.py", "exec"), module.__dict__)
    return kernel, module


def everything_held(module):
    """All that a monitor may touch, by name."""
    spaces = {name: vars(sys.modules[name]) for name in ("flash_attn", "flash_attn.flash_attn_interface")}
    spaces |= {"model": vars(module), "table": module.TABLE, "class": dict(vars(module.FlashAttention))}
    return {(space, name): value for space, names in spaces.items() for name, value in list(names.items())}


def inputs(batch=2, length=12, seed=1):
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed))


def assert_measured(package, model, *args, route, **kwargs):
    kernel, module = package
    before, plain = everything_held(module), model(*args, **kwargs)
    held = dict(vars(model.attn))
    kernel.weights.clear()
    output = []
    hook = model.register_forward_hook(lambda module, given, result: output.append(result))
    snapshot, records = watched(model, *args, **kwargs)
    hook.remove()
    after = everything_held(module)
    assert all(after[place] is value for place, value in before.items())
    assert all(vars(model.attn)[name] is value for name, value in held.items())
    assert torch.equal(output[0], plain)
    record = records["attn"]
    assert (record.status, record.calls, record.route) == ("captured", 1, route), record
    assert_heads(snapshot["entropy"]["attn"], entropy(kernel.weights[0]))
    return record


@pytest.mark.parametrize("how", ["global", "attribute", "positional", "local", "static", "held", "partial", "table"])
def test_however_it_was_imported(package, how):
    options = {} if how == "partial" else {"causal": True}
    record = assert_measured(package, package[1].Model(how, **options), inputs(), route="flash_attn_func")
    assert record.heads == HEADS
    assert record.kind == "self"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "softcap": 1.5},
        {"window_size": (3, 2)},
        {"causal": True, "window_size": (4, -1)},
        {"window_size": (None, 2), "dropout_p": 0.0, "deterministic": True, "return_attn_probs": False},
        {"softmax_scale": 0.7, "s_aux": torch.linspace(0, 3, HEADS)},
        {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"alibi_slopes": torch.rand(2, HEADS, generator=torch.Generator().manual_seed(0)), "softcap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("queries", [12, 7])
def test_options(package, options, queries):
    source = inputs(length=12, seed=2)
    model = package[1].Model(**options)
    assert_measured(package, model, inputs(length=queries), source=source, route="flash_attn_func")


@pytest.mark.parametrize(("how", "batch"), [("qkvpacked", 2), ("kvpacked", 2)])
def test_packed_into_one_tensor(package, how, batch):
    options = {"causal": True, "window_size": (5, 0), "softcap": 2.0}
    assert_measured(package, package[1].Model(how, **options), inputs(batch), route=f"flash_attn_{how}_func")


@pytest.mark.parametrize("how", ["varlen", "varlen_qkvpacked", "varlen_kvpacked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (2, 0)},
        {"alibi_slopes": torch.tensor([1.0, 0.5, 0.2, 0.1])},
    ],
    ids=str,
)
def test_variable_lengths(package, how, options):
    bounds = torch.tensor([0, 5, 6, 14, 24], dtype=torch.int32)
    assert_measured(package, package[1].Model(how, **options), inputs(), bounds=bounds, route=f"flash_attn_{how}_func")


def test_equal_boundaries_in_two_tensors(package):
    bounds = torch.tensor([0, 5, 24], dtype=torch.int32)
    model = package[1].Model("varlen", causal=True)
    assert_measured(package, model, inputs(), bounds=bounds, bounds_k=bounds.clone(), route="flash_attn_varlen_func")


def test_long_alibi_is_not_written_out(package, monkeypatch):
    monkeypatch.setattr("attnmon.capture.routes.flash._DENSE_ELEMENTS", 1)
    model = package[1].Model(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    assert_measured(package, model, inputs(), route="flash_attn_func")


@pytest.mark.parametrize(
    ("how", "options", "bounds", "reason"),
    [
        ("varlen", {}, ([0, 5, 24], [0, 6, 24]), "other boundaries for keys"),
        ("varlen", {}, ([0, 5, 24], [0, 6, 9, 24]), "other boundaries for keys"),
        ("varlen", {"block_table": torch.zeros(1)}, ([0, 24], [0, 24]), "block_table"),
        ("varlen", {"alibi_slopes": torch.zeros(1, 4)}, ([0, 24], [0, 24]), "alibi_slopes"),
        ("global", {"qv": torch.zeros(1)}, None, "qv"),
        ("global", {"attention_chunk": 4}, None, "attention_chunk"),
    ],
)
def test_refused_with_a_reason(package, how, options, bounds, reason):
    module = package[1]
    model = module.Model(how, **options)
    given = {}
    if bounds is not None:
        given = dict(zip(("bounds", "bounds_k"), (torch.tensor(each) for each in bounds), strict=True))

    def anything(*args, **kwargs):  # a kernel that takes more arguments than this one
        return torch.zeros(2, 12, HEADS, DIM)

    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        if how == "global" or "alibi_slopes" in options or len(bounds[0]) != len(bounds[1]):
            for space in (vars(sys.modules["flash_attn"]), vars(module)):
                space[name] = anything
    _, records = watched(model, inputs(), options={"on_error": "warn"}, **given)
    assert records["attn"].status == "skipped"
    assert reason in records["attn"].reason


def test_arguments_by_the_names_of_the_installed_version(package):
    """Version 3 has the scale where version 2 has dropout."""
    kernel, module = package

    def version_3(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, window_size=(-1, -1)):
        return kernel.flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size)

    for space in (vars(sys.modules["flash_attn"]), vars(module)):
        space["flash_attn_func"] = version_3
    model = module.Model()
    model.attn.forward = lambda x: module.flash_attn_func(*(heads(model, x)), 0.9, True)
    snapshot, records = watched(model, inputs())
    assert records["attn"].status == "captured"
    assert_heads(snapshot["entropy"]["attn"], entropy(kernel.weights[0]))


def heads(model, x):
    attn = model.attn
    return (layer(x).view(*x.shape[:2], -1, DIM) for layer in (attn.q, attn.k, attn.v))


def test_a_package_imported_between_two_steps(package, monkeypatch):
    module = package[1]
    gone = {name: sys.modules[name] for name in ("flash_attn", "flash_attn.flash_attn_interface")}
    for name in gone:
        monkeypatch.delitem(sys.modules, name)
    monitor = attnmon.watch(module.Model(causal=True), **EVERYTHING)
    with monitor.step():
        pass
    for name, each in gone.items():
        monkeypatch.setitem(sys.modules, name, each)
    model = module.Model(causal=True)
    monitor = attnmon.watch(model, **EVERYTHING)
    with monitor.step():
        model(inputs())
    late = types.ModuleType("imported_later")
    late.flash_attn_func = module.flash_attn_func
    monkeypatch.setitem(sys.modules, "imported_later", late)
    model.attn.forward = lambda x: late.flash_attn_func(*heads(model, x))
    with monitor.step():
        model(inputs())
    assert monitor.coverage()[0].calls == 2
    monitor.close()


def test_what_was_imported_during_a_step_is_put_right(package, monkeypatch):
    model = package[1].Model()
    monitor = attnmon.watch(model, **EVERYTHING)
    monitor.begin_step()
    late = types.ModuleType("imported_later")
    exec("from flash_attn import flash_attn_func", late.__dict__)
    monkeypatch.setitem(sys.modules, "imported_later", late)
    assert isinstance(late.flash_attn_func, Replacement)
    monitor.end_step()
    assert late.flash_attn_func is sys.modules["flash_attn"].flash_attn_func
    assert not isinstance(late.flash_attn_func, Replacement)


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("how", slow_but(("global", "table"), ("global", "table", "static", "held", "partial")))
def test_two_monitors_unwind_in_any_order(package, how, first_out):
    model = package[1].Model(how)
    before = everything_held(package[1])
    held = model.attn.held
    monitors = [attnmon.watch(model, **EVERYTHING) for _ in range(2)]
    for _ in range(2):
        for monitor in monitors:
            monitor.begin_step()
        model(inputs())
        monitors[first_out].pause()
        model(inputs())
        monitors[first_out].resume()
        model(inputs())
        monitors[1 - first_out].end_step()
        model(inputs())
        monitors[first_out].end_step()
        assert all(everything_held(package[1])[place] == value for place, value in before.items())
        assert vars(model.attn)["held"] is held
    assert [monitor.coverage()[0].calls for monitor in monitors] == [6, 6]
    for monitor in monitors:
        monitor.close()


def test_the_call_belongs_to_the_innermost_module(package):
    module = package[1]

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = module.Model(causal=True), module.Model("qkvpacked")

        def forward(self, x):
            return self.first(x), self.second(x)

    snapshot, records = watched(Two(), inputs())
    assert records["first.attn"].route == "flash_attn_func"
    assert records["second.attn"].route == "flash_attn_qkvpacked_func"
    for path, weights in zip(("first.attn", "second.attn"), package[0].weights, strict=True):
        assert_heads(snapshot["entropy"][path], entropy(weights))


def test_the_model_is_not_kept_alive(package):
    model, others = package[1].Model("held"), set(ORIGINALS)
    monitor = attnmon.watch(model, **EVERYTHING)
    with monitor.step():
        model(inputs())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with monitor.step():
        pass
    monitor.close()
    del monitor
    gc.collect()
    assert not set(ORIGINALS) - others


def test_training_is_bitwise_the_same(package):
    def train(monitored):
        model = package[1].Model(causal=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = attnmon.watch(model, rules=(), on_error="raise")
        for _ in range(2):
            if monitored:
                monitor.begin_step()
            model(inputs()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step()
        monitor.close()
        return model.state_dict()

    plain, monitored = train(False), train(True)
    assert all(torch.equal(plain[name], monitored[name]) for name in plain)


def test_compiled_in_one_graph(package):
    torch._dynamo.reset()
    module = package[1]

    def traceable(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
        logits = (q @ k.transpose(-1, -2)) * DIM**-0.5
        logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), float("-inf"))
        return (logits.softmax(-1) @ v).transpose(1, 2)

    for space in (vars(sys.modules["flash_attn"]), vars(module)):
        space["flash_attn_func"] = traceable
    model = module.Model(causal=True, softcap=2.0)
    expected, _ = watched(model, inputs())
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    plain = compiled(inputs())
    monitor = attnmon.watch(compiled, **EVERYTHING)
    for _ in range(3):
        with monitor.step():
            assert torch.equal(compiled(inputs()), plain)
    compiled(inputs())
    record = monitor.coverage()[0]
    assert (record.calls, record.route) == (3, "flash_attn_func"), record
    assert_heads(monitor.flush()["entropy"]["attn"], torch.from_numpy(expected["entropy"]["attn"]))
    assert len(graphs) == 2
    monitor.close()
    assert vars(module)["flash_attn_func"] is traceable
