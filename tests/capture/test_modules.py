"""Names and discovery of modules, and the monitored model as a plain module."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import _get_current_function_mode_stack as function_modes

import attnmon
from attnmon.capture import modules as names
from tests.capture.weights import EVERYTHING, assert_heads, entropy, randomize, watched

WIDTH, HEADS, LENGTH = 24, 3, 10


class Attention(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(WIDTH, 3 * WIDTH), heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class EagerAttention(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.attn, self.mlp = attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.mlp(x + self.attn(x))


class Model(nn.Module):
    def __init__(self, attention=Attention, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(attention) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PATHS = ["layers.0.attn", "layers.1.attn", "layers.2.attn"]


def make(attention=Attention):
    torch.manual_seed(0)
    return randomize(Model(attention), std=0.3).train()


def inputs(seed=1, batch=3):
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", ""),
        ("module", ""),
        ("layers.0.attn", "layers.0.attn"),
        ("module.layers.0.attn", "layers.0.attn"),
        ("_orig_mod.layers.0.attn", "layers.0.attn"),
        ("module._orig_mod.h.0._checkpoint_wrapped_module.attn", "h.0.attn"),
        ("_fsdp_wrapped_module.h.1._fsdp_wrapped_module.attn._fsdp_wrapped_module", "h.1.attn"),
        ("h.0._orig_mod.attn", "h.0.attn"),
    ],
)
def test_canonical_paths(name, expected):
    assert names.canonical_path(name) == expected


def paths(model):
    return [path for path, module in names.walk(model) if names.looks_like_attention(module)]


WRAPPINGS = {
    "bare": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "data parallel, compiled": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_wrappers_leave_paths_alone(name):
    model = make()
    for index in (0, 2):
        model.layers[index] = checkpoint_wrapper(model.layers[index])
    model.layers[1].attn = torch.compile(model.layers[1].attn, backend="eager")
    wrapped = WRAPPINGS[name](model)
    assert paths(wrapped) == PATHS
    assert len({id(module) for _, module in names.walk(wrapped)}) == len(list(names.walk(wrapped)))


def test_distributed_wrappers_are_known_by_class(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = make()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert paths(wrapped) == PATHS

        class Subclass(nn.parallel.DistributedDataParallel):
            pass

        assert paths(Subclass(make())) == PATHS
        with attnmon.watch(wrapped, **EVERYTHING) as monitor:
            with monitor.step():
                wrapped(inputs()).sum().backward()
            assert [record.path for record in monitor.coverage()] == PATHS
            assert [record.calls for record in monitor.coverage()] == [1, 1, 1]
    finally:
        torch.distributed.destroy_process_group()


def test_a_child_that_is_called_module_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Attention()

    assert paths(Holder()) == ["module"]
    assert paths(nn.DataParallel(Holder())) == ["module"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CausalSelfAttention", True), ("LlamaAttention", True), ("MHA", True), ("GroupedMultiHeadAttn", True),
        ("WindowAttention3D", True), ("Attend", True), ("MultiheadLatent", True), ("Attention", True),
        ("AttendanceList", False), ("AttentionMask", False), ("AttnBiasCache", False), ("SelfAttentionOutput", False),
        ("AttentionNorm", False), ("AttentionPool", False), ("Block", False), ("Mamba", False),
    ],
)  # fmt: skip
def test_what_looks_like_attention(name, expected):
    assert names.looks_like_attention(type(name, (nn.Module,), {})()) is expected


def _through_two(q, k, v):
    return _inner(q, k, v)


def _inner(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def _unrelated(x):
    return x * 2


class Nested(nn.Module):
    def forward(self, x):
        return _through_two(x, x, x)


class Method(nn.Module):
    def forward(self, x):
        return self._mix(x)

    def _mix(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Lambda(nn.Module):
    def forward(self, x):
        return [F.softmax(y, -1) for y in x]


class Plain(nn.Module):
    def forward(self, x):
        return _unrelated(x)


class Recursive(nn.Module):
    def forward(self, x):
        return self.forward(x) if x is None else _unrelated(x)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(Nested, True), (Method, True), (Lambda, True), (Plain, False), (Recursive, False), (nn.Linear, False)],
)
def test_forwards_that_mention_attention(cls, expected):
    assert names.mentions_attention(cls(2, 2) if cls is nn.Linear else cls()) is expected


def test_a_model_without_attention_is_refused():
    with pytest.raises(attnmon.AttnmonError, match="found no attention in Plain"):
        attnmon.watch(Plain())
    with pytest.raises(attnmon.AttnmonError, match="must be a torch"):
        attnmon.watch(lambda x: x)


@pytest.mark.parametrize("name", ["num_heads", "num_attention_heads", "n_head", "nhead", "heads", "n_local_heads"])
def test_head_counts_under_their_usual_names(name):
    module = nn.Module()
    setattr(module, name, 6)
    assert names.head_count(module) == 6
    setattr(module, name, True)
    assert names.head_count(module) is None


@pytest.mark.parametrize(
    ("path", "cls", "expected"),
    [
        ("layers.0.self_attn", "Attention", "self"),
        ("layers.0.encoder_attn", "BartAttention", "cross"),
        ("layers.0.cross_attn", "Attention", "cross"),
        ("layers.0.EncDecAttention", "T5Attention", "cross"),
        ("cross_decoder.layers.0.attn", "Attention", "self"),
        ("layers.0.attn", "CrossAttention", "cross"),
        ("encoder.layers.0.attn", "Attention", "self"),
    ],
)
def test_kinds_by_name(path, cls, expected):
    assert names.kind_of(path, type(cls, (nn.Module,), {})()) == expected


def test_kinds_by_what_is_given():
    """Two layers of one class and no telling name, as diffusion models have them."""

    class Mixer(Attention):
        def forward(self, x, context=None):
            context = x if context is None else context
            q, k, v = (self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)[i]
                       for i, y in enumerate((x, context, context)))  # fmt: skip
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    class Attn1Then2(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn1, self.attn2 = Mixer(), Mixer()

        def forward(self, x, context):
            return self.attn2(self.attn1(x, context=x), context=context)

    for length in (LENGTH, 7):
        _, coverage = watched(Attn1Then2(), inputs(), inputs(2)[:, :length])
        assert {path: record.kind for path, record in coverage.items()} == {"attn1": "self", "attn2": "cross"}


@pytest.mark.parametrize("spelled", [False, True])
def test_padding_of_the_other_sequence_excludes_no_query(spelled):
    """Sequences of one length, and a name that says what they are."""
    padded = torch.arange(LENGTH)[None] >= torch.tensor([[LENGTH], [6], [3]])

    class CrossAttention(Attention):
        def forward(self, x, other):
            q, k, v = (self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)[i]
                       for i, y in enumerate((x, other, other)))  # fmt: skip
            visible = ~padded[:, None, None, :]
            if not spelled:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).flatten(2)
            return (q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1) @ v

    snapshot, coverage = watched(CrossAttention(), inputs(), inputs(2))
    assert coverage[""].kind == "cross"
    assert (snapshot.rows[""] == 3 * LENGTH).all()
    assert (snapshot.excluded[""] == 0).all()


# -- shared and repeated modules -------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer, used three times, as in ALBERT."""

    def __init__(self, attention):
        super().__init__()
        self.layer = Layer(attention)
        self.same = self.layer  # a second name for it
        self.group = nn.ModuleList([self.layer])

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return x


@pytest.mark.parametrize("attention", [Attention, EagerAttention])
def test_a_module_used_several_times_merges_by_rows(attention):
    torch.manual_seed(0)
    model = randomize(Shared(attention), std=0.3)
    monitor = attnmon.watch(model, **EVERYTHING)
    x, separate = inputs(), []
    for _ in range(2):
        with monitor.step():
            model(x)
    for _ in range(3):
        separate.append(watched(model.layer, x)[0]["entropy"]["attn"])
        x = model.layer(x)
    (record,) = monitor.coverage()
    assert (record.path, record.calls, record.status) == ("layer.attn", 6, "captured")
    snapshot = monitor.flush()
    assert (snapshot.rows["layer.attn"] == 3 * 3 * LENGTH).all()
    assert_heads(snapshot["entropy"]["layer.attn"], torch.from_numpy(sum(separate) / 3))
    monitor.close()


def test_albert():
    transformers = pytest.importorskip("transformers")
    config = transformers.AlbertConfig(
        vocab_size=90, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=48, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = randomize(transformers.AlbertModel(config))
    ids = torch.randint(2, 88, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    snapshot, coverage = watched(model, ids)
    (record,) = coverage.values()
    assert (record.calls, record.heads) == (4, 4)
    assert_heads(snapshot["entropy"][record.path], entropy(torch.cat(weights)))


def test_calls_of_different_lengths_merge_by_rows():
    model = make()
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(inputs())
            model(inputs(2, batch=5)[:, :4])
        merged = monitor.flush()
        assert (merged.rows[PATHS[0]] == 3 * LENGTH + 5 * 4).all()
    one, other = watched(model, inputs())[0], watched(model, inputs(2, batch=5)[:, :4])[0]
    for path in PATHS:
        expected = (one["entropy"][path] * 3 * LENGTH + other["entropy"][path] * 20) / (3 * LENGTH + 20)
        assert_heads(merged["entropy"][path], torch.from_numpy(expected))


# -- patterns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": "layers.1.*"}, [1]),
        ({"include": ["layers.0.attn", "*.2.attn"]}, [0, 2]),
        ({"exclude": "*.1.attn"}, [0, 2]),
        ({"include": "layers.*", "exclude": ["layers.0.*"]}, [1, 2]),
    ],
)
@pytest.mark.parametrize("attention", [Attention, EagerAttention])
def test_include_and_exclude(attention, options, expected):
    snapshot, coverage = watched(make(attention), inputs(), options=options)
    assert snapshot.modules == tuple(PATHS[index] for index in expected)
    for index, path in enumerate(PATHS):
        record = coverage[path]
        assert record.status == ("captured" if index in expected else "skipped")
        assert ("patterns" in record.reason) == (index not in expected)
        assert record.calls == (index in expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "encoder.*"}, "matches no attention module"),
        ({"include": "layers.0.mlp"}, "leave no attention module"),
        ({"exclude": "*"}, "leave no attention module"),
    ],
)
def test_patterns_that_leave_nothing(options, message):
    with pytest.raises(attnmon.AttnmonError, match=message):
        attnmon.watch(make(), **options)


# -- the model as a plain module -------------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
}


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", [Attention, EagerAttention])
def test_copies_are_of_the_bare_model(attention, way, inside):
    model, x = make(attention), inputs()
    with torch.no_grad():
        expected = model(x)
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(x)
            if inside:
                twin = WAYS[way](model)
        if not inside:
            twin = WAYS[way](model)
        with monitor.step():
            torch.testing.assert_close(twin(x), expected)
            model(x)
            twin.train()(x).sum().backward()
        assert [record.calls for record in monitor.coverage()] == [2, 2, 2]
    assert hooks(model) == 0
    with attnmon.watch(twin, **EVERYTHING) as monitor:  # and can be watched themselves
        with monitor.step():
            twin(x)
        assert [record.calls for record in monitor.coverage()] == [1, 1, 1]
    torch.testing.assert_close(twin(x), expected)


def test_state_dicts_inside_and_between_steps():
    model, x = make(), inputs()
    keys, values = list(model.state_dict()), {name: value.clone() for name, value in model.state_dict().items()}
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(x)
            assert list(model.state_dict()) == keys
            model.load_state_dict(values)
        assert list(model.state_dict()) == keys
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        assert [name for name, _ in model.named_buffers()] == []


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", [Attention, pytest.param(EagerAttention, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strict", [True, False])
def test_export(attention, inside, strict):
    model, x = make(attention).eval(), inputs()
    plain = torch.export.export(model, (x,), strict=strict)
    calls = [str(node.target) for node in plain.graph.nodes]
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(x)
            if inside:
                exported = torch.export.export(model, (x,), strict=strict)
        if not inside:
            exported = torch.export.export(model, (x,), strict=strict)
        with monitor.step():
            model(x)
        assert [record.calls for record in monitor.coverage()] == [2, 2, 2]
    assert [str(node.target) for node in exported.graph.nodes] == calls
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("attention", [Attention, EagerAttention])
def test_a_trace_is_of_the_bare_model(attention):
    model, x = make(attention).eval(), inputs()
    plain = str(torch.jit.trace(model, (x,)).inlined_graph)
    with attnmon.watch(model, **EVERYTHING) as monitor, monitor.step():
        traced = torch.jit.trace(model, (x,), check_trace=False)
        model(x)
    assert str(traced.inlined_graph).count("aten::") == plain.count("aten::")
    assert [record.calls for record in monitor.coverage()] == [1, 1, 1]


def test_moving_and_casting_between_steps():
    model, x = make(), inputs()
    with attnmon.watch(model, **EVERYTHING) as monitor:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model.to(dtype)
            with monitor.step():
                model(x.to(dtype)).sum().backward()
            model.zero_grad()
        assert [record.calls for record in monitor.coverage()] == [3, 3, 3]


def test_hooks_of_the_user_see_what_they_saw_and_stay():
    model, seen = make(), []
    attention = model.layers[1].attn
    attention.register_forward_pre_hook(lambda module, args: seen.append("before") or (args[0] * 0.5,))
    attention.register_forward_hook(lambda module, args, output: seen.append("after") or output + 1.0)
    expected = model(inputs())
    seen.clear()
    with attnmon.watch(model, **EVERYTHING) as monitor:
        for _ in range(2):
            with monitor.step():
                added = attention.register_forward_hook(lambda *args: seen.append("added"))
                assert torch.equal(model(inputs()), expected)
            assert seen == ["before", "after", "added"]
            seen.clear()
            assert torch.equal(model(inputs()), expected)
            assert seen == ["before", "after", "added"]
            added.remove()
            seen.clear()
    assert (len(attention._forward_hooks), len(attention._forward_pre_hooks)) == (1, 1)


# -- monitors beside each other, and faults --------------------------------------------------------------------


class WrappedMha(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize("attention", [Attention, EagerAttention, WrappedMha])
def test_two_monitors_on_one_model(attention):
    model, x = make(attention), inputs()
    one = attnmon.watch(model, **EVERYTHING)
    other = attnmon.watch(model, every_n_steps=2, **EVERYTHING)
    for step in range(4):
        with one.step(), other.step():
            model(x).sum().backward()
        if step == 2:
            assert one.flush().step == other.flush().step == 2
            for path, heads in one.latest["entropy"].items():
                assert_heads(other.latest["entropy"][path], torch.from_numpy(heads), 1e-6)
        model.zero_grad()
    assert {record.calls for record in one.coverage() if record.calls} == {4}
    assert {record.calls for record in other.coverage() if record.calls} == {2}
    with one.step(), other.step():  # step 4 is measured by both; closed inside, in the wrong order
        model(x)
        one.close()
        model(x)
    assert {record.calls for record in other.coverage() if record.calls} == {4}
    other.close()
    assert hooks(model) == 0
    assert function_modes() == []


class Failing(Layer):
    def forward(self, x):
        x = super().forward(x)
        if self.fail == "after":
            raise KeyError("in the model")
        return x


class FailingAttention(EagerAttention):
    fail = False

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        if self.fail == "after the product":
            raise KeyError("in the model")
        weights = scores.softmax(-1)
        if self.fail == "after the softmax":
            raise KeyError("in the model")
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("where", ["after the product", "after the softmax"])
@pytest.mark.parametrize("caught", ["inside the step", "outside the step"])
def test_an_exception_in_the_middle_of_a_forward(where, caught):
    model, x = make(FailingAttention), inputs()
    expected = watched(model, x)[0]
    middle = model.layers[1].attn
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(x)
        middle.fail = where
        if caught == "inside the step":
            with monitor.step():
                with pytest.raises(KeyError, match="in the model"):
                    model(x)
                assert [type(mode) for mode in function_modes()] == []
                middle.fail = False
                model(x)
        else:
            with pytest.raises(KeyError, match="in the model"), monitor.step():
                model(x)
            middle.fail = False
        assert function_modes() == []
        assert hooks(model) == 0
        with monitor.step():
            model(x)
        snapshot = monitor.flush()
        for path in PATHS:
            assert_heads(snapshot["entropy"][path], torch.from_numpy(expected["entropy"][path]), 1e-6)
            assert (snapshot.rows[path] == 3 * LENGTH).all()


def test_an_exception_leaves_the_first_wide_step_usable():
    model, x = make(FailingAttention), inputs()
    model.layers[0].attn.fail = "after the product"
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with pytest.raises(KeyError, match="in the model"), monitor.step():
            model(x)
        assert function_modes() == []
        model.layers[0].attn.fail = False
        with monitor.step():
            model(x)
        assert [record.calls for record in monitor.coverage()] == [1, 1, 1]
    assert hooks(model) == 0


def test_a_module_that_is_replaced_or_added_later_does_no_harm():
    model, x = make(), inputs()
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(x)
        model.layers[0].attn = Attention()
        with monitor.step():
            model(x)
        calls = {record.path: record.calls for record in monitor.coverage()}
        assert calls == dict(zip(PATHS, (1, 2, 2), strict=True))
    assert hooks(model) == 0
