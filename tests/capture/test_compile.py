"""Compiled models: one graph without a break, at most one more for measured steps, the same numbers."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import attnmon
from tests.capture.weights import EVERYTHING, assert_heads, hooks, randomize
from tests.helpers import slow_but
from tests.models import gpt2_config

WIDTH, HEADS = 24, 3


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # how a model is watched depends on whether graphs broke
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Attention(nn.Module):
    def __init__(self, kind="sdpa"):
        super().__init__()
        self.kind, self.num_heads = kind, HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "prescaled":
            q = q * q.shape[-1] ** -0.5
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        elif self.kind == "sink":
            z = self.masked(q @ k.mT * q.shape[-1] ** -0.5)
            sink = torch.linspace(-1, 1, HEADS).view(1, HEADS, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
            z = torch.cat([z, sink], dim=-1)
            z = z - z.max(dim=-1, keepdim=True).values
            out = F.softmax(z, dim=-1)[..., :-1] @ v
        else:
            out = torch.softmax(self.masked(q @ k.mT * q.shape[-1] ** -0.5), dim=-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))

    def masked(self, z):
        causal = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
        return z.masked_fill(~causal, torch.finfo(z.dtype).min)


class MhaLayer(nn.Module):
    def __init__(self, kind=None):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, kind="sdpa", layers=2):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(MhaLayer() if kind == "mha" else Attention(kind) for _ in range(layers))
        self.checkpointing = None

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            if self.checkpointing is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.checkpointing)
        return x


KINDS = ("sdpa", "prescaled", "eager", "sink", "mha")


def make(kind="sdpa"):
    torch.manual_seed(0)
    return randomize(Model(kind), std=0.3).train()


def batches(count, length=12, batch=3):
    return torch.randn(count, batch, length, WIDTH, generator=torch.Generator().manual_seed(7))


def train(run, model, data, monitor=None):
    """Losses of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for x in data:
        with monitor.step() if monitor else torch.enable_grad():
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def uncompiled(kind, data, **options):
    """Snapshot of the last step of the same training without a compiler."""
    model = make(kind)
    with attnmon.watch(model, **{**EVERYTHING, **options}) as monitor:
        losses = train(model, model, data, monitor)
        return losses, monitor.flush()


def assert_same_numbers(one, other, rtol=2e-4):
    assert one.step == other.step
    assert one.modules == other.modules
    assert one.metrics == other.metrics
    for metric in one.metrics:
        assert one[metric].keys() == other[metric].keys(), metric
        for path in one[metric]:
            assert_heads(one[metric][path], torch.from_numpy(other[metric][path]), rtol, f"{metric} {path}")


@pytest.mark.parametrize(
    ("kind", "attach", "every"),
    [
        ("sdpa", "before", 2),
        ("eager", "after", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sdpa", "after", 1),
                *((kind, "before", 1) for kind in KINDS),
                *((kind, "after", 2) for kind in KINDS if kind != "eager"),
            )
        ),
    ],
)
def test_one_graph_more_at_most_and_none_broken(kind, attach, every):
    data = batches(7)
    model, counter = make(kind), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    expected_losses, expected = uncompiled(kind, data, every_n_steps=every)
    assert expected_losses == train_plain(kind, data)
    if attach == "after":
        with torch.enable_grad():
            compiled(data[0]).sum().backward()
        model.zero_grad()
        assert counter.frame_count == 1
    monitor = attnmon.watch(compiled, every_n_steps=every, **EVERYTHING)
    losses = train(compiled, model, data, monitor)
    assert counter.frame_count <= 2
    if every == 1 and attach == "before":
        assert counter.frame_count == 1
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses))
    names = [f"layers.{layer}" + (".attention" if kind == "mha" else "") for layer in range(2)]
    records = monitor.coverage()
    assert [record.path for record in records] == names
    assert {record.calls for record in records} == {len(range(0, 7, every))}
    assert [record.refused for record in records] == [{}, {}]
    assert_same_numbers(monitor.flush(), expected)
    monitor.close()
    assert hooks(model) == 0
    compiled(data[0])
    assert counter.frame_count <= 2


def train_plain(kind, data):
    model = make(kind)
    return train(model, model, data)


class Graphs:
    """A backend that runs graphs as they are and keeps the aten operators of forward and backward."""

    def __init__(self):
        self.kept = []
        self.backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)

    def keep(self, graph, example):
        self.kept.append(graph.graph)
        return make_boxed_func(graph.forward)


def operators(graph):
    """What a graph calls, and how often attnmon is among it; what only attnmon reads is not counted."""
    ours, others = set(), set()
    for node in graph.nodes:  # ours, and the buffer that our operator claims to write
        if any("attnmon" in str(argument) for argument in (node.target, *node.args)) or ours & {*node.all_input_nodes}:
            ours.add(node)
    ours -= {node for node in graph.nodes if node.op == "output"}
    for node in reversed(graph.nodes):
        if node.op == "output" or others & set(node.users):
            others.update({node} - ours)
            if node.op == "output":
                others.update(set(node.all_input_nodes) - ours)
    calls = [str(node.target) for node in graph.nodes if node in others and node.op.startswith("call")]
    return calls, sum(len(node.args) > 0 and "attnmon" in str((node.target, node.args[0])) for node in ours)


@pytest.mark.parametrize("kind", slow_but(("sdpa",), KINDS))
def test_unmeasured_steps_run_the_graph_they_ran_before(kind):
    """And that of measured steps has the same operators apart from attnmon's own."""
    data, graphs = batches(6), Graphs()
    model = make(kind)
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    train(compiled, model, data[:1])
    assert len(graphs.kept) == 2  # forward and backward
    with attnmon.watch(compiled, every_n_steps=3, **EVERYTHING) as monitor:
        train(compiled, model, data, monitor)
    train(compiled, model, data)
    assert len(graphs.kept) == 4
    assert monitor.latest.step == 3
    plain, measured = operators(graphs.kept[0]), operators(graphs.kept[2])
    assert (plain[1], measured[1]) == (0, 2)
    assert measured[0] == plain[0]
    assert operators(graphs.kept[3]) == operators(graphs.kept[1])


@pytest.mark.parametrize("kind", slow_but(("sdpa",), ("sdpa", "eager", "mha")))
def test_compiled_in_place(kind):
    """``model.compile()``, as Lightning's users do, keeps the module and its names."""
    data = batches(4)
    model = make(kind)
    expected_losses, expected = uncompiled(kind, data)
    model.compile(backend=CompileCounterWithBackend("aot_eager"), fullgraph=True)
    with attnmon.watch(model, **EVERYTHING) as monitor:
        torch.testing.assert_close(torch.tensor(train(model, model, data, monitor)), torch.tensor(expected_losses))
        assert_same_numbers(monitor.flush(), expected)


class Wrapper(nn.Module):
    """Like a LightningModule: compiled or not, it calls a model that is."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.model(x))


@pytest.mark.parametrize(
    "how", slow_but(("one layer",), ("submodule", "submodule in place", "one layer", "loss function", "forward"))
)
def test_a_compiled_region_inside_an_eager_model(how):
    data = batches(6)
    model, counter = Wrapper(make()), CompileCounterWithBackend("aot_eager")
    run = model
    if how == "submodule":
        model.model = torch.compile(model.model, backend=counter, fullgraph=True)
    elif how == "submodule in place":
        model.model.compile(backend=counter, fullgraph=True)
    elif how == "one layer":
        model.model.layers[0] = torch.compile(model.model.layers[0], backend=counter, fullgraph=True)
    elif how == "loss function":
        run = torch.compile(lambda x: model(x) * 1.0, backend=counter, fullgraph=True)
    else:
        model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    monitor = attnmon.watch(model, every_n_steps=2, **EVERYTHING)
    train(run, model, data, monitor)
    assert counter.frame_count == 2
    records = monitor.coverage()
    assert [record.path for record in records] == ["model.layers.0", "model.layers.1"]
    assert [(record.calls, record.status) for record in records] == [(3, "captured")] * 2
    monitor.close()
    assert hooks(model) == 0


def test_dynamic_shapes_stay_one_graph():
    model, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    twin = make()
    with attnmon.watch(compiled, **EVERYTHING) as monitor, attnmon.watch(twin, **EVERYTHING) as other:
        for length in (8, 12, 17, 9):
            x = batches(1, length)
            train(compiled, model, x, monitor)
            train(twin, twin, x, other)
            assert_same_numbers(monitor.flush(), other.flush())
        assert (monitor.flush().rows["layers.0"] == 3 * 9).all()
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["eager", "mha"])
@pytest.mark.slow
def test_dynamic_shapes_of_other_routes(kind):
    model = make(kind)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    twin = make(kind)
    with attnmon.watch(compiled, **EVERYTHING) as monitor, attnmon.watch(twin, **EVERYTHING) as other:
        for length in (8, 13):
            train(compiled, model, batches(1, length), monitor)
            train(twin, twin, batches(1, length), other)
            assert_same_numbers(monitor.flush(), other.flush())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor():
    data = batches(3)
    model = make()
    expected_losses, expected = uncompiled("sdpa", data)
    compiled = torch.compile(model, fullgraph=True)
    with attnmon.watch(compiled, **EVERYTHING) as monitor:
        losses = train(compiled, model, data, monitor)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-4, atol=1e-6)
        assert_same_numbers(monitor.flush(), expected, rtol=1e-3)


@pytest.mark.parametrize("kind", slow_but(("sdpa",), ("sdpa", "eager")))
def test_checkpointing_inside_a_compiled_model(kind):
    data = batches(3)
    model, counter = make(kind), CompileCounterWithBackend("aot_eager")
    model.checkpointing = False
    option = torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with attnmon.watch(compiled, **EVERYTHING) as monitor:
        train(compiled, model, data, monitor)
        assert_same_numbers(monitor.flush(), uncompiled(kind, data)[1])
    assert counter.frame_count == 1
    assert [record.calls for record in monitor.coverage()] == [3, 3]
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint == option


def test_evaluation_of_a_compiled_model_between_measured_steps():
    model, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    data = batches(4)
    with torch.no_grad():
        expected = compiled(data[0])
    with attnmon.watch(compiled, **EVERYTHING) as monitor:
        for x in data:
            with monitor.step():
                compiled(x).sum().backward()
                monitor.pause()
                with torch.no_grad():
                    torch.testing.assert_close(compiled(data[0]), expected)
                monitor.resume()
    assert counter.frame_count <= 3  # with and without gradients, and measured
    assert [record.calls for record in monitor.coverage()] == [4, 4]


@pytest.mark.slow
def test_graph_breaks_are_allowed():
    class Broken(Model):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x)
                torch._dynamo.graph_break()
            return x

    torch.manual_seed(0)
    model = randomize(Broken(), std=0.3).train()
    compiled = torch.compile(model, backend="aot_eager")
    data = batches(3)
    with attnmon.watch(compiled, **EVERYTHING) as monitor:
        train(compiled, model, data, monitor)
        assert_same_numbers(monitor.flush(), uncompiled("sdpa", data)[1])
    assert [record.calls for record in monitor.coverage()] == [3, 3]


@pytest.mark.slow
def test_models_of_transformers_compile_with_every_layer_seen():
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 90, (3, 20), generator=torch.Generator().manual_seed(0))
    for attention in ("sdpa", "eager"):
        model = randomize(transformers.GPT2LMHeadModel(gpt2_config(attention))).train()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with attnmon.watch(compiled, **EVERYTHING) as monitor, attnmon.watch(model, **EVERYTHING) as plain:
            for _ in range(3):
                with monitor.step():
                    compiled(input_ids=ids).logits.sum().backward()
            with plain.step():
                model(input_ids=ids)
            assert Counter(record.status for record in monitor.coverage()) == {"captured": 2}
            assert counter.frame_count == 1
            one, other = monitor.flush(), plain.flush()
            for path in ("transformer.h.0.attn", "transformer.h.1.attn"):
                assert_heads(one["entropy"][path], torch.from_numpy(other["entropy"][path]))
                assert_heads(one["jacobian"][path], torch.from_numpy(other["jacobian"][path]), 5e-4)


class Broken(nn.Module):
    """A model whose compiled code breaks into several graphs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        torch._dynamo.graph_break()
        length = torch.arange(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x + length[:, None] * 0)
            torch._dynamo.graph_break()
        return x


@pytest.mark.slow
def test_a_model_that_breaks_graphs_goes_on():
    data = batches(5)
    torch.manual_seed(0)
    model = Broken()
    expected = [model(x).sum().item() for x in data]
    compiled = torch.compile(model, backend="aot_eager")
    compiled(data[0])
    assert torch._dynamo.utils.counters["graph_break"]
    with attnmon.watch(model, **EVERYTHING) as monitor:
        for x, loss in zip(data, expected, strict=True):
            with monitor.step():
                got = compiled(x).sum()
                got.backward()
            torch.testing.assert_close(got.item(), loss)
        assert [(record.path, record.calls) for record in monitor.coverage()] == [("layers.0", 5), ("layers.1", 5)]
