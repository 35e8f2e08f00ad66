"""torch's fused Transformer paths: chosen call by call as without a monitor, with the same operators and bits."""

import pytest
import torch
from torch import nn

import attnmon
from attnmon.capture.coverage import MAY_BE_FUSED
from tests.capture.weights import SeenByDispatchMode, calls, hooks
from tests.models import SdpaAttention, inputs

WIDTH, HEADS, LENGTH = 16, 2, 6
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensor"),
    pytest.mark.filterwarnings("ignore:attnmon. a measured step captured no attention call"),
]


def layer():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)


def frozen(module):
    return module.eval().requires_grad_(False)


class EncoderInAttention(nn.Module):
    """A frozen encoder inside a class whose name says attention."""

    def __init__(self):
        super().__init__()
        self.encoder, self.pool = (
            frozen(nn.TransformerEncoder(layer(), 2)),
            frozen(nn.MultiheadAttention(16, 2, batch_first=True)),
        )
        self.inner = SdpaAttention()

    def forward(self, x, pad=None):
        with torch.no_grad():
            seen = self.encoder(x, src_key_padding_mask=pad)
            seen = (
                seen + self.pool(seen, seen, seen, key_padding_mask=None if pad is None else pad[:, : seen.shape[1]])[0]
            )
        return self.inner(x) + seen.mean()


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head, self.teacher = EncoderInAttention(), layer(), frozen(layer())

    def forward(self, x, pad=None):
        return self.head(self.attention(x, pad)) + self.teacher(x, src_key_padding_mask=pad).detach().mean()


def operators(run):
    with SeenByDispatchMode() as seen:
        result = run()
    return seen.seen, result


PADDING = {"whole": None, "padded": torch.arange(LENGTH)[None] >= torch.tensor([[LENGTH], [4]])}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_operators_and_bits_of_every_step_are_the_bare_ones(context, padding):
    model, x, other = Student(), inputs(length=LENGTH), frozen(nn.TransformerEncoder(layer(), 1))

    def run():
        with context():
            return model(x, PADDING[padding]), other(x, src_key_padding_mask=PADDING[padding])

    bare, expected = operators(run)
    assert any("_transformer_encoder_layer_fwd" in name for name in bare)
    assert any("_native_multi_head_attention" in name for name in bare)
    with attnmon.watch(model, rules=(), on_error="raise") as monitor:
        for _ in range(3):  # the first one watches more modules than the others
            with monitor.step():
                seen, result = operators(run)
            assert seen == bare
            assert all(torch.equal(left, right) for left, right in zip(result, expected, strict=True))
        by_path = {record.path: record for record in monitor.coverage()}
        assert by_path["attention.inner"].calls == 3
        assert by_path["head.self_attn"].calls == 3
        for path in ("attention.encoder.layers.0.self_attn", "attention.pool", "teacher.self_attn"):
            assert (by_path[path].status, by_path[path].reason) == ("skipped", MAY_BE_FUSED)


def test_a_layer_that_goes_in_and_out_of_evaluation_within_a_step():
    """Its hooks go where the fused path would count them, and are back for the next call."""
    model, x = layer(), inputs(length=LENGTH)

    def evaluate():
        model.eval()
        with torch.no_grad():
            return model(x)

    def learn():
        model.train()
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        return out

    def evaluate_with_gradients():  # no fused path then
        model.eval()
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        return out

    runs = (learn, evaluate, learn, evaluate_with_gradients, evaluate, evaluate_with_gradients, learn)
    bare = [operators(run) for run in runs]
    with attnmon.watch(model, rules=(), on_error="raise") as monitor:
        for step in range(2):
            with monitor.step():
                for run, (expected, result) in zip(runs, bare, strict=True):
                    seen, out = operators(run)
                    assert seen == expected
                    assert torch.equal(out, result)
            assert calls(monitor) == [5 * (step + 1)]
    assert hooks(model) == 0


class Listening(nn.TransformerEncoderLayer):
    """torch's own forward, with a hook of the user's on it."""

    def __init__(self):
        super().__init__(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.norm1.register_forward_hook(lambda *args: None)


ODD = {  # why it is not fused, and whether its attention is not fused by itself either, so that a call is refused
    "hooked": (Listening, 0),
    "autocast": (layer, 0),
    "heads": (lambda: nn.TransformerEncoderLayer(15, 3, 32, batch_first=True), 1),
    "last": (lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32), 1),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.filterwarnings("ignore:attnmon. .*an attention call is not measured")
def test_layers_that_are_not_fused_for_another_reason(odd, inside):
    make, refused = ODD[odd]
    alone = make().eval()
    model = nn.Sequential(nn.Identity(), alone) if inside else alone
    x = torch.randn(2, LENGTH, alone.self_attn.embed_dim)
    path = "1.self_attn" if inside else "self_attn"

    def run(gradients):
        model.zero_grad()
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=odd == "autocast"):
            return model(x)

    bare = [operators(lambda gradients=gradients: run(gradients)) for gradients in (False, True)]
    with attnmon.watch(model, rules=(), on_error="raise") as monitor:
        for step in range(2):
            for gradients in (False, True):
                with monitor.step():
                    seen, result = operators(lambda gradients=gradients: run(gradients))
                assert seen == bare[gradients][0]
                assert torch.equal(result, bare[gradients][1])
            (record,) = monitor.coverage()
            assert (record.path, record.calls) == (path, step + 1)
            assert sum(record.refused.values()) == refused * (step + 1)


def test_a_layer_of_the_users_own_keeps_its_hooks():
    """Only torch's own forward counts hooks."""

    class Own(nn.TransformerEncoderLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            return self.norm1(src + self._sa_block(src, src_mask, src_key_padding_mask))

    model = Own(WIDTH, HEADS, 32, batch_first=True).eval()
    with attnmon.watch(model, rules=(), on_error="raise") as monitor:
        with monitor.step():
            model(inputs()).sum().backward()
        assert calls(monitor) == [1]


@pytest.mark.parametrize("subclass", [False, True])
def test_a_tensor_with_rules_of_its_own_still_counts(subclass):
    class Own(torch.Tensor):
        pass

    model = frozen(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    x = inputs().as_subclass(Own) if subclass else inputs()

    def run():
        with torch.no_grad():
            return model(x, x, x)[0]

    bare, expected = operators(run)
    assert any("_native_multi_head_attention" in name for name in bare) is not subclass
    with attnmon.watch(model, rules=()) as monitor, monitor.step():
        seen, result = operators(run)
        assert seen == bare
        assert torch.equal(result, expected)


@pytest.mark.parametrize("grads", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_frozen_encoder_in_a_compiled_model(grads, recwarn):
    """With gradients it makes calls that can be seen: they are not taken for calls of the modules around it."""
    torch._dynamo.reset()
    model, x = Student(), inputs(length=LENGTH)
    model.teacher.requires_grad_(grads)
    bare = torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with attnmon.watch(compiled, rules=()) as monitor:
        for _ in range(3):
            with monitor.step():
                assert torch.equal(compiled(x), bare)
        seen = {record.path: record.calls for record in monitor.coverage() if record.calls or record.refused}
        assert seen == {"attention.pool": 3, "attention.inner": 3, "head.self_attn": 3}
    torch._dynamo.reset()
    assert not [warning for warning in recwarn if issubclass(warning.category, attnmon.AttnmonWarning)]
