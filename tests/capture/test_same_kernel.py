"""The same operators are dispatched with the monitor on and off; and those of SDPA give the weights measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attnmon
from tests.capture.weights import EVERYTHING, assert_heads, entropy, of_rows, randomize, watched
from tests.helpers import slow_but
from tests.models import gpt2_config

OURS = str(Path(attnmon.__file__).parent)
# frames of ours inside of which the model's own call runs
PASSING_ON = {"__torch_function__", "intercept", "__call__"}


def is_ours():
    """Whether the operator being dispatched is attnmon's own work."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            return frame.f_code.co_name not in PASSING_ON
        frame = frame.f_back
    return False


class Operators(TorchDispatchMode):
    """Every aten operator with the shapes, types and numbers it is given; attnmon's own counted apart."""

    def __init__(self):
        super().__init__()
        self.calls, self.own = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_ours():
            self.own += 1
        else:
            self.calls.append((str(func), *map(describe, args), *map(describe, (kwargs or {}).items())))
        return func(*args, **(kwargs or {}))


def describe(argument):
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.stride(), argument.dtype, argument.requires_grad)
    if isinstance(argument, (list, tuple)):
        return tuple(map(describe, argument))
    return str(argument)


def train_step(model, inputs, autocast):
    torch.manual_seed(4)
    for tensor in inputs.values():
        tensor.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs)
    output = getattr(output, "last_hidden_state", output)
    output = getattr(output, "logits", output)
    output.float().square().mean().backward()


def recorded(model, inputs, autocast=False):
    with Operators() as operators:
        train_step(model, inputs, autocast)
    return operators


def gpt2(attention):
    transformers = pytest.importorskip("transformers")
    config = gpt2_config(attention, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    return transformers.GPT2Model(config).train()


def tokens():
    ids = torch.randint(0, 90, (3, 20), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": (torch.arange(20)[None] < torch.tensor([[20], [14], [9]])).long()}


def gpt_oss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return transformers.GptOssForCausalLM(config).train()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True), reentrant

    def forward(self, src):
        return checkpoint(self.layer, src.requires_grad_(), use_reentrant=self.reentrant)


def source(**more):
    return {"src": torch.randn(3, 10, 24, generator=torch.Generator().manual_seed(1)), **more}


MODELS = {
    "sdpa": (lambda: gpt2("sdpa"), tokens),
    "eager": (lambda: gpt2("eager"), tokens),
    "sinks": (gpt_oss, tokens),
    "mha": (lambda: nn.TransformerEncoderLayer(24, 3, 32, batch_first=True), source),
    "mha, masked": (
        lambda: nn.TransformerEncoderLayer(24, 3, 32, norm_first=True),
        lambda: source(src_mask=torch.ones(3, 3).triu(1).bool()),
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(24, 3, 32),
        lambda: {"tgt": source()["src"], "memory": torch.randn(5, 10, 24)},
    ),
    "checkpointed": (lambda: Checkpointed(False), source),
    "checkpointed, reentrant": (lambda: Checkpointed(True), source),
}


@pytest.mark.parametrize("autocast", slow_but((False,), (False, True)))
@pytest.mark.parametrize("name", MODELS)
def test_the_same_operators_run(name, autocast):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make(), inputs()
    plain = recorded(model, inputs, autocast)
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert plain.own == 0
    assert len(plain.calls) > 50
    with attnmon.watch(model, rules=(), on_error="raise") as monitor:
        for _ in range(2):
            with monitor.step():
                watched_run = recorded(model, inputs, autocast)
            assert watched_run.own == 0  # a mode of the user's sees nothing of ours
            assert watched_run.calls == plain.calls
        for parameter, gradient in zip(
            (parameter for parameter in model.parameters() if parameter.grad is not None), gradients, strict=True
        ):
            assert torch.equal(parameter.grad, gradient)
        assert {record.calls for record in monitor.coverage()} == {2}
    after = recorded(model, inputs, autocast)
    assert after.calls == plain.calls
    assert after.own == 0


def test_the_comparison_notices_another_kernel():
    model = gpt2("sdpa")
    with sdpa_kernel(SDPBackend.MATH):
        math_calls = recorded(model, tokens()).calls
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inputs = {"input_ids": tokens()["input_ids"]}
        assert recorded(gpt2("sdpa").eval(), inputs).calls != math_calls


# -- true weights ----------------------------------------------------------------------------------------------


class Kernel(nn.Module):
    def __init__(self, backend, **options):
        super().__init__()
        self.backend, self.options, self.num_heads = backend, options, 4
        self.attention = Attention()

    def forward(self, q, k, v):
        with sdpa_kernel(self.backend):
            return self.attention(q, k, v, self.options)


class Attention(nn.Module):
    def forward(self, q, k, v, options):
        return F.scaled_dot_product_attention(q, k, v, **options)


LONG, DIM = 24, 8


def weights_of(kernel, q, k, groups=1):
    """The kernel's own weights [B, H, Lq, Lk]: values that are blocks of the identity give a block of columns each."""
    blocks = torch.eye(LONG).split(DIM, dim=1)
    heads = q.shape[1] // groups
    columns = [kernel(q, k, block.expand(q.shape[0], heads, LONG, DIM).contiguous()) for block in blocks]
    return torch.cat(columns, dim=-1)


KERNELS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.9},
    "bool mask": {"attn_mask": torch.rand(2, 1, LONG, LONG, generator=torch.Generator().manual_seed(3)) < 0.7},
    "bias": {"attn_mask": torch.randn(1, 4, LONG, LONG, generator=torch.Generator().manual_seed(4))},
    "grouped": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_weights_out_of_the_real_kernel(backend, name):
    options = KERNELS[name]
    groups = 2 if name == "grouped" else 1
    seed = torch.Generator().manual_seed(2)
    q = 1.5 * torch.randn(2, 4, LONG, DIM, generator=seed)
    k = 1.5 * torch.randn(2, 4 // groups, LONG, DIM, generator=seed)
    v = torch.randn(2, 4 // groups, LONG, DIM, generator=seed)
    kernel = Kernel(backend, **options)
    weights = weights_of(kernel, q, k, groups)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, LONG))
    snapshot, coverage = watched(kernel, q, k, v)
    (path,) = snapshot.modules
    assert (coverage[path].route, coverage[path].heads) == ("sdpa", 4)
    assert_heads(snapshot["entropy"][path], entropy(weights))
    assert_heads(snapshot["max_prob"][path], of_rows(weights.double().amax(-1), None))
    assert_heads(snapshot["first_mass"][path], of_rows(weights.double()[..., 0], None))


def test_the_kernels_asked_for_are_two():
    q = torch.randn(2, 4, LONG, DIM)
    names = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with Operators() as operators:
            Kernel(backend)(q, q, q)
        names.append({call[0] for call in operators.calls})
    assert any("flash_attention" in name for name in names[1])
    assert not any("flash_attention" in name for name in names[0])


# -- shapes that SDPA takes ------------------------------------------------------------------------------------


class Shaped(nn.Module):
    """Attention whose tensors have other axes than [B, H, L, D]."""

    def __init__(self, change, heads=4, **options):
        super().__init__()
        self.change, self.options = change, options
        if heads:
            self.num_heads = heads

    def forward(self, x):
        q, k, v = self.change(x)
        out = F.scaled_dot_product_attention(q, k, v, **self.options)
        self.weights = dense(q, k, self.options.get("attn_mask"))
        return out


def dense(q, k, mask):
    with torch._C.DisableTorchFunction(), torch.no_grad():
        z = q.double() @ k.double().mT / q.shape[-1] ** 0.5
        return z.masked_fill(~mask, -torch.inf).softmax(-1) if mask is not None else z.softmax(-1)


class ShapedAttention(Shaped):
    pass


def per_head(x, heads=4):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


SHAPES = {
    # change, heads that are to be reported, how weights become [B, H, Lq, Lk]
    "one head": (lambda x: (x, x * 0.5, x), None, 1, lambda w: w[:, None]),
    "heads folded into sequences": (
        lambda x: tuple(y.flatten(0, 1) for y in (per_head(x), per_head(x) * 0.3, per_head(x))), 4, 4,
        lambda w: w.unflatten(0, (3, 4)),
    ),
    "folded, heads not stated": (
        lambda x: tuple(y.flatten(0, 1) for y in (per_head(x), per_head(x) * 0.3, per_head(x))), None, 4,
        lambda w: w.unflatten(0, (3, 4)),
    ),
    "five axes": (
        lambda x: tuple(per_head(x).unflatten(2, (2, 6)).transpose(1, 2) for _ in range(3)), 4, 4,
        lambda w: w.flatten(0, 1),
    ),
    "queries shared by sequences": (
        lambda x: (per_head(x)[:1] * 2.0, per_head(x), per_head(x)), 4, 4, lambda w: w,
    ),
    "keys shared by heads": (
        lambda x: (per_head(x), per_head(x)[:, :1], per_head(x)[:, :1]), 4, 4, lambda w: w,
    ),
    "two axes": (lambda x: (x[0], x[0] * 0.5, x[0]), None, 1, lambda w: w[None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_axes_of_sdpa(name):
    change, heads, reported, as_heads = SHAPES[name]
    model = nn.Sequential(ShapedAttention(change, heads))
    x = torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(8))
    snapshot, coverage = watched(model, x)
    assert (coverage["0"].heads, coverage["0"].refused) == (reported, {})
    weights = as_heads(model[0].weights)
    assert_heads(snapshot["entropy"]["0"], entropy(weights))
    assert (snapshot.rows["0"] == weights.shape[0] * weights.shape[2]).all()


def test_masks_of_folded_heads():
    mask = torch.rand(12, 12, 12, generator=torch.Generator().manual_seed(9)) < 0.8
    mask[..., 0] = True
    model = nn.Sequential(ShapedAttention(SHAPES["heads folded into sequences"][0], 4, attn_mask=mask))
    x = torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(8))
    snapshot, _ = watched(model, x)
    assert_heads(snapshot["entropy"]["0"], entropy(model[0].weights.unflatten(0, (3, 4))))


def test_randomized_models_are_far_from_uniform():
    model = randomize(nn.MultiheadAttention(24, 3))
    assert float(model.in_proj_weight.detach().std()) > 0.2
    assert EVERYTHING["rows"] is None
