"""Small models and ways of training them, for comparing a watched run with its bare twin bit by bit."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attnmon
from tests.models import HEADS, WIDTH, MhaAttention, SdpaAttention

LENGTH, BATCH, LAYERS = 8, 3, 2
aten = torch.ops.aten


class MaskedEagerAttention(SdpaAttention):
    def attend(self, q, k, v):
        z = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        hidden = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
        weights = F.softmax(z.masked_fill(hidden, torch.finfo(z.dtype).min), dim=-1)
        return F.dropout(weights, 0.1, self.training) @ v


class FlexAttention(SdpaAttention):
    def attend(self, q, k, v):
        from torch.nn.attention.flex_attention import flex_attention

        # on a CPU it has no backward
        q, k, v = (tensor.detach() for tensor in (q, k, v))
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs() * 0.1)


class RegistryAttention(SdpaAttention):
    is_causal = True

    def attend(self, q, k, v):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS["flash_attention_2"](self, q, k, v, None, scaling=0.3)[0].transpose(1, 2)


def flash(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Stands in the place of the registered flash kernel: by operators of which no mode of ours tells."""
    with torch._C.DisableTorchFunction():
        z = (query @ key.transpose(-1, -2)) * scaling
        causal = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
        return (z.masked_fill(~causal, float("-inf")).softmax(-1) @ value).transpose(1, 2), None


ATTENTION = {
    "sdpa": SdpaAttention,
    "eager": MaskedEagerAttention,
    "mha": functools.partial(MhaAttention, dropout=0.1, need_weights=False),
    "flex": FlexAttention,
    "registry": RegistryAttention,
}


def _matmuls():
    seen = {True: 0, False: 0}

    def policy(context, op, *args, **kwargs):
        if op in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            seen[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _alternate():
    seen = {True: 0, False: 0}

    def policy(context, op, *args, **kwargs):
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES = {
    "save all": lambda: lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "save none": lambda: lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
    "save matmuls": _matmuls,
    "save alternate": _alternate,
}


class Block(nn.Module):
    def __init__(self, kind, dropout):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), ATTENTION[kind]()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two blocks behind a frozen encoder, which is there in one way of training only."""

    def __init__(self, kind, way):
        super().__init__()
        # saved and changed in place by turns, random numbers differ from run to run without a monitor, too
        dropout = 0.0 if way == "save alternate" else 0.1
        self.way, self.blocks = way, nn.ModuleList(Block(kind, dropout) for _ in range(LAYERS))
        self.frozen = None
        if way == "frozen parts":
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
            self.frozen = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)

    def forward(self, x):
        if self.frozen is not None:
            pad = torch.arange(LENGTH)[None] >= torch.tensor([[LENGTH], [LENGTH - 2], [LENGTH]])
            with torch.no_grad():
                seen = self.frozen(x, src_key_padding_mask=pad)
            x = x + seen
        for block in self.blocks:
            if self.way in POLICIES:
                contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[self.way](), True)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            elif "checkpoint" in self.way:
                x = checkpoint(block, x, use_reentrant=self.way == "checkpoint, reentrant")
            else:
                x = block(x)
        return x


WAYS = (
    "plain", "checkpoint, reentrant", "checkpoint", *POLICIES, "compiled", "compiled per block",
    "compiled, checkpoint", "autocast", "gradient penalty", "frozen parts",
)  # fmt: skip


@dataclass
class Trained:
    """What a run leaves behind, every step's loss and gradients first."""

    steps: list = field(default_factory=list)
    weights: list = field(default_factory=list)
    random: torch.Tensor | None = None
    graphs: int = 0


def train(kind, way, steps=4, **options):
    """A run of some steps; watched if there are options."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Model(kind, way)
    if way == "save alternate":
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
    data = torch.randn(steps, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    run = model
    if way.startswith("compiled per block"):
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    elif way.startswith("compiled"):
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    monitor = attnmon.watch(run, **options) if options else None
    result = Trained()
    # the fused kernel has no second derivative
    every = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    backends = every[:1] if way == "gradient penalty" else every
    for x in data:
        x.requires_grad_()
        with monitor.step() if monitor else nullcontext(), sdpa_kernel(backends):
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = run(x).float().square().mean()
            if way == "gradient penalty":
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            result.steps.append([loss.detach(), x.grad.clone(), *gradients])
            optimizer.step()
            optimizer.zero_grad()
    result.weights = [parameter.detach().clone() for parameter in model.parameters()]
    result.random = torch.get_rng_state()
    result.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if monitor:
        monitor.close()
    return result, monitor


bare = functools.cache(lambda kind, way: train(kind, way)[0])


def assert_same_bits(one, other):
    """Losses, gradients, weights and random state are equal to the last bit."""
    for step, (seen, expected) in enumerate(zip(one.steps, other.steps, strict=True)):
        for index, (left, right) in enumerate(zip(seen, expected, strict=True)):
            assert torch.equal(left, right), f"step {step}, tensor {index}"
    assert all(torch.equal(left, right) for left, right in zip(one.weights, other.weights, strict=True))
    assert torch.equal(one.random, other.random)
