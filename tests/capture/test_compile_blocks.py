"""Blocks compiled one by one share their graphs; where the compiler fails over attnmon, the call goes on without it."""

import copy
import itertools
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnmon
import attnmon.capture.compiled.emitted
import attnmon.capture.recorder
from tests.capture.weights import EVERYTHING, assert_heads, calls, hooks
from tests.models import HEADS, KINDS, WIDTH, inputs


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, kind, inside):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), KINDS[kind](), nn.Linear(WIDTH, WIDTH)
        self.inside = inside

    def forward(self, x):
        y = self.norm(x)
        x = x + (checkpoint(self.attn, y, use_reentrant=False) if self.inside else self.attn(y))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, kind, layers, inside=False, around=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.around = nn.Linear(WIDTH, WIDTH), around
        self.blocks = nn.ModuleList(Block(kind, inside) for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return x


def compile_blocks(model, how, **options):
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(**options)
        else:
            model.blocks[index] = torch.compile(block, **options)


def train(model, lengths, monitor=None):
    """Losses and gradients of every step."""
    result = []
    for seed, length in enumerate(lengths):
        x = inputs(length=length, seed=seed)
        model.zero_grad()
        with monitor.step() if monitor else torch.enable_grad():
            loss = model(x).square().mean()
            loss.backward()
        result += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return result


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


CASES = {
    "full graphs": {},
    "breaks allowed": {"fullgraph": False},
    "torch.compile": {"how": "wrapped"},
    "checkpoint inside": {"inside": True},
    "checkpoint around": {"around": True},
    "both": {"inside": True, "around": True, "how": "wrapped"},
    "dynamic": {"dynamic": True, "lengths": (8, 11, 9)},
    "lengths": {"lengths": (8, 11, 9)},
    "48 blocks": {"layers": 48},
    "every second": {"every": 2, "lengths": (8,) * 4},
    "compiled before": {"before": 2},
}


def compare(
    kind, *, layers=12, how="in place", lengths=(8, 8, 8), every=1, before=0, inside=False, around=False, **options
):
    options = {"fullgraph": True, "backend": "aot_eager", **options}
    runs = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Model(kind, layers, inside, around)
        compile_blocks(model, how, **options)
        first = train(model, lengths[:1] * before)
        monitor = attnmon.watch(model, every_n_steps=every, rules=(), on_error="raise") if watched else None
        runs.append((first + train(model, lengths, monitor), graphs(), monitor, model))
    (bare, bare_graphs, _, _), (seen, seen_graphs, monitor, model) = runs
    assert all(torch.equal(left, right) for left, right in zip(bare, seen, strict=True))
    assert seen_graphs <= 2 * bare_graphs
    if every == 1 and not before and not around:
        assert seen_graphs == bare_graphs
    assert calls(monitor) == [-(-len(lengths) // every)] * layers
    assert {record.status for record in monitor.coverage()} == {"captured"}
    monitor.close()
    assert hooks(model) == 0


QUICK = {("sdpa", "full graphs"), ("mha", "full graphs")}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=() if (kind, case) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for case in CASES
    ],
)
def test_at_most_one_further_set_of_graphs(kind, case):
    compare(kind, **CASES[case])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor():
    compare("sdpa", layers=4, backend="inductor")


def test_each_block_has_its_own_numbers():
    model, twin = Model("sdpa", 4), Model("sdpa", 4)
    compile_blocks(model, "in place", fullgraph=True, backend="aot_eager")
    with attnmon.watch(model, **EVERYTHING) as monitor, attnmon.watch(twin, **EVERYTHING) as other:
        train(model, (8,), monitor)
        train(twin, (8,), other)
        one, two = monitor.flush(), other.flush()
        assert one.modules == two.modules == tuple(f"blocks.{index}.attn" for index in range(4))
        for path in one.modules:
            assert_heads(one["entropy"][path], torch.from_numpy(two["entropy"][path]), 1e-5, path)
        assert len({float(one["entropy"][path][0]) for path in one.modules}) == 4


def test_a_new_monitor_needs_no_new_graphs():
    model = Model("sdpa", 3)
    compile_blocks(model, "in place", fullgraph=True, backend="aot_eager")
    for _ in range(12):  # torch's limit of recompilations is 8
        with attnmon.watch(model, rules=(), on_error="raise") as monitor:
            train(model, (8,), monitor)
            assert calls(monitor) == [1] * 3
    assert graphs() == 1


@pytest.mark.slow
def test_two_monitors_of_a_compiled_model():
    model = Model("sdpa", 3)
    compile_blocks(model, "in place", fullgraph=True, backend="aot_eager")
    first, second = attnmon.watch(model, rules=()), attnmon.watch(model, rules=())
    for _ in range(2):
        first.begin_step()
        second.begin_step()
        model(inputs()).sum().backward()
        first.end_step()
        model(inputs()).sum().backward()
        second.end_step()
    assert (calls(first), calls(second)) == ([2] * 3, [4] * 3)


# -- the compiler fails -----------------------------------------------------------------------------------------


def raises():
    raise RuntimeError("no tracing today")


FAULTS = {"raises": raises, "breaks": torch._dynamo.graph_break}
PLACES = {
    "enter": (attnmon.capture.recorder.Recorder, "enter"),
    "frame": (attnmon.capture.recorder.Recorder, "_frame"),
    "leave": (attnmon.capture.recorder.Recorder, "leave"),
    "operator": (attnmon.capture.compiled.emitted.GraphCalls, "_call"),
}


QUICK_FAILURES = {
    ("frame", "breaks", True, "whole"),
    ("enter", "raises", False, "blocks"),
}


@pytest.mark.parametrize(
    ("place", "fault", "fullgraph", "how"),
    [
        pytest.param(*case, marks=() if case in QUICK_FAILURES else pytest.mark.slow)
        for case in itertools.product(PLACES, FAULTS, (True, False), ("whole", "blocks"))
    ],
)
def test_hooks_that_fail_while_traced_cost_the_module_alone(place, fault, fullgraph, how, monkeypatch):
    def make():
        torch._dynamo.reset()
        model = nn.ModuleDict({"compiled": Model("sdpa", 3), "eager": KINDS["sdpa"]()})
        if how == "whole":
            model["compiled"].compile(fullgraph=fullgraph, backend="aot_eager")
        else:
            compile_blocks(model["compiled"], "in place", fullgraph=fullgraph, backend="aot_eager")
        return model

    def run(model):
        model.zero_grad()
        loss = model["eager"](model["compiled"](inputs())).square().mean()
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    bare = run(make())
    owner, name = PLACES[place]
    real = getattr(owner, name)

    def failing(*args, **kwargs):
        if torch.compiler.is_compiling():
            FAULTS[fault]()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    model = make()
    monitor = attnmon.watch(model, rules=())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with monitor.step():
                seen = run(model)
            assert all(torch.equal(left, right) for left, right in zip(seen, bare, strict=True))
    records = {record.path: record for record in monitor.coverage()}
    assert (records["eager"].status, records["eager"].calls) == ("captured", 3)
    attention = [f"compiled.blocks.{index}.attn" for index in range(3)]
    assert set(records) == {"eager", *attention}  # nothing is told of another module
    for path in attention:
        record = records[path]
        assert record.status in ("captured", "skipped")
        assert record.status == "captured" or "compile" in record.reason
    if fullgraph:
        assert all(records[path].reason.startswith("the compiler raised") for path in attention)
        said = [str(warning.message) for warning in caught if warning.category is attnmon.AttnmonWarning]
        assert len(said) == 1
        assert "the compiler raised" in said[0]
    assert hooks(model) == 0


def test_an_error_of_the_users_own_is_the_users_to_see():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = KINDS["sdpa"]()

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.attn(x)

    model = nn.Sequential(Wrong())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    monitor = attnmon.watch(model, rules=(), on_error="warn")
    with (
        pytest.raises(torch._dynamo.exc.Unsupported),
        pytest.warns(attnmon.AttnmonWarning, match="the compiler raised"),
        monitor.step(),
    ):
        compiled(inputs())
    assert hooks(model) == 0


# -- code that breaks into several graphs, attached before its first call ---------------------------------------------


class BreaksInside(nn.Module):
    """Between a scale on the queries and the call, and after it; what follows reads properties of tensors."""

    def __init__(self, eager=False):
        super().__init__()
        self.qkv, self.num_heads, self.eager = nn.Linear(WIDTH, 3 * WIDTH), HEADS, eager

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q = q * 0.5
        torch._dynamo.graph_break()
        if self.eager:
            z = (q @ k.mT) * 0.7
            torch._dynamo.graph_break()
            weights = (z / 2).softmax(-1)
            torch._dynamo.graph_break()
            out = F.dropout(weights, 0.0) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        torch._dynamo.graph_break()
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return out.transpose(1, 2).flatten(2) + positions[:, None] * 0


class BreaksOutside(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        if kind.startswith("inside"):
            self.layers = nn.ModuleList(BreaksInside(kind == "inside, eager") for _ in range(2))
        else:
            self.layers = nn.ModuleList(KINDS[kind]() for _ in range(2))

    def forward(self, x):
        torch._dynamo.graph_break()
        length = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x + length[:, None] * 0)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        pytest.param(kind, before, marks=() if (kind, before) == ("sdpa", 0) else pytest.mark.slow)
        for kind in (*KINDS, "inside, sdpa", "inside, eager")
        for before in (0, 1)
    ],
)
def test_broken_graphs_are_followed(kind, before):
    model, twin = BreaksOutside(kind), BreaksOutside(kind)
    compiled = torch.compile(model, backend="aot_eager")
    data = [inputs(seed=seed) for seed in range(3)]
    bare = [twin(x).sum().item() for x in data]
    for x in data[:before]:
        compiled(x)
    with attnmon.watch(model, **EVERYTHING) as monitor, attnmon.watch(twin, **EVERYTHING) as other:
        for x, expected in zip(data, bare, strict=True):
            with monitor.step():
                loss = compiled(x).sum()
                loss.backward()
            assert loss.item() == expected
            with other.step():
                twin(x)
        assert calls(monitor) == [3, 3]
        one, two = monitor.flush(), other.flush()
        for metric in ("entropy", "jacobian", "max_logit", "separability"):
            for path in one.modules:
                assert_heads(one[metric][path], torch.from_numpy(two[metric][path]), 1e-5, f"{metric} {path}")


@pytest.mark.filterwarnings("ignore::attnmon.AttnmonWarning")
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        pytest.param(how, kind, marks=() if (how, kind) in {("whole", "sdpa"), ("blocks", "mha")} else pytest.mark.slow)
        for how in ("whole", "blocks")
        for kind in KINDS
    ],
)
def test_attention_that_is_kept_out_of_the_graph(kind, how):
    """Right or refused: what its module did before the call is not known to eager code."""

    class KeptAttention(KINDS[kind]):
        @torch._dynamo.disable
        def forward(self, x):
            return super().forward(x)

    model = Model(kind, 3)
    for block in model.blocks:
        block.attn = KeptAttention()
    twin = copy.deepcopy(model)
    if how == "whole":
        model.compile(backend="aot_eager")
    else:
        compile_blocks(model, "in place", backend="aot_eager")
    options = {**EVERYTHING, "on_error": "warn"}
    with attnmon.watch(model, **options) as monitor, attnmon.watch(twin, **options) as other:
        for _ in range(3):
            seen, expected = train(model, (8,), monitor), train(twin, (8,), other)
            torch.testing.assert_close(seen, expected)
        assert calls(other) == [3] * 3
        captured = {record.path for record in monitor.coverage() if record.status == "captured"}
        assert {record.path for record in monitor.coverage()} == {record.path for record in other.coverage()}
        one, two = monitor.flush(), other.flush()
        assert captured == (set(two.modules) if kind == "mha" else set())
        for path in captured:
            assert_heads(one["entropy"][path], torch.from_numpy(two["entropy"][path]), 1e-5, path)
        if kind == "sdpa":
            assert all("cannot be followed" in record.reason for record in monitor.coverage())
