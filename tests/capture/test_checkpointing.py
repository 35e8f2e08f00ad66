"""Activation checkpointing runs forwards again inside the backward: every call is counted once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import attnmon
from tests.capture.weights import EVERYTHING, assert_heads, randomize
from tests.helpers import slow_but

WIDTH, HEADS, LENGTH = 24, 3, 10


class SdpaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(WIDTH, 3 * WIDTH), HEADS

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class EagerAttention(SdpaAttention):
    def attend(self, q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class MhaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


LAYERS = {"sdpa": SdpaAttention, "eager": EagerAttention, "mha": MhaAttention}


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attn, self.mlp = LAYERS[kind](), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, kind, how=None, layers=3):
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Block(kind) for _ in range(layers)), how

    def forward(self, x):
        if self.how == "sequential":
            return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
        for index, block in enumerate(self.blocks):
            if self.how in ("reentrant", "not reentrant"):
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            elif self.how == "every second" and index % 2:
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "attention alone":
                x = x + checkpoint(block.attn, x, use_reentrant=False)
                x = x + block.mlp(x)
            elif self.how == "nested":
                x = checkpoint(lambda y, block=block: checkpoint(block, y, use_reentrant=False), x, use_reentrant=False)
            elif self.how == "kept for the whole backward":
                x = checkpoint(block, x, use_reentrant=False, early_stop=False)
            else:
                x = block(x)
        return x


def make(kind, how=None):
    torch.manual_seed(0)
    return randomize(Model(kind, how), std=0.3).train()


def inputs(seed=1):
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def run(model, micro_batches=2, **options):
    """Two steps of some micro-batches: last snapshot, coverage and gradients."""
    with attnmon.watch(model, **{**EVERYTHING, **options}) as monitor:
        for _ in range(2):
            model.zero_grad()
            with monitor.step():
                for seed in range(micro_batches):
                    model(inputs(seed)).square().mean().backward()
            assert function_modes() == []
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return monitor.flush(), monitor.coverage(), gradients


def assert_counted_once(one, other):
    """The same run, with and without checkpointing."""
    for snapshot, coverage, gradients in (one, other):
        assert snapshot is not None
        assert gradients
        assert all(record.status == "captured" for record in coverage)
    assert one[1] == other[1]
    assert {record.calls for record in one[1]} == {4}
    assert one[0].modules == other[0].modules
    for path in one[0].modules:
        assert (one[0].rows[path] == other[0].rows[path]).all()
        assert (one[0].rows[path] == 2 * 3 * LENGTH).all()
        for metric in ("entropy", "jacobian", "max_logit", "separability"):
            assert_heads(one[0][metric][path], torch.from_numpy(other[0][metric][path]), 1e-6, f"{metric} {path}")
    torch.testing.assert_close(one[2], other[2])


WAYS = (
    *("reentrant", "not reentrant", "every second", "attention alone", "nested", "sequential"),
    "kept for the whole backward",
)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", slow_but(("sdpa", "eager"), LAYERS))
def test_counts_are_those_without_checkpointing(kind, how):
    if how == "attention alone":
        other = make(kind)
        other.how = "attention alone"
        plain = make(kind)
        plain.forward = lambda x: _plain(plain, x)
        assert_counted_once(run(other), run(plain))
        return
    assert_counted_once(run(make(kind, how)), run(make(kind)))


def _plain(model, x):
    for block in model.blocks:
        x = x + block.attn(x)
        x = x + block.mlp(x)
    return x


@pytest.mark.parametrize("implementation", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT])
@pytest.mark.parametrize("what", ["blocks", "attention", "all blocks at once"])
def test_checkpoint_wrappers_leave_no_trace_in_names(what, implementation):
    plain = run(make("sdpa"))
    model = make("sdpa")
    if what == "blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=implementation)
    elif what == "attention":
        for block in model.blocks:
            block.attn = checkpoint_wrapper(block.attn, checkpoint_impl=implementation)
    else:
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=implementation),
            check_fn=lambda module: isinstance(module, Block),
        )  # fmt: skip
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    wrapped = run(model)
    assert wrapped[0].modules == tuple(f"blocks.{index}.attn" for index in range(3))
    assert_counted_once(wrapped, plain)


def test_offloading_wrappers_are_left_out_of_names_too():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    model = make("sdpa")
    model.blocks[0] = offload_wrapper(model.blocks[0])
    assert_counted_once(run(model), run(make("sdpa")))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_transformers(reentrant, attention):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 90, (3, 14), generator=torch.Generator().manual_seed(0))
    results = []
    for checkpointing in (True, False):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=1, use_cache=False,
        )  # fmt: skip
        config._attn_implementation = attention
        model = randomize(transformers.LlamaForCausalLM(config)).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with attnmon.watch(model, **EVERYTHING) as monitor:
            for _ in range(2):
                with monitor.step():
                    model(input_ids=ids).logits.square().mean().backward()
            results.append((monitor.flush(), monitor.coverage()))
    (one, first), (other, second) = results
    assert first == second
    assert [record.calls for record in first] == [2, 2]
    for path in one.modules:
        assert (one.rows[path] == 3 * 14).all()
        assert_heads(one["entropy"][path], torch.from_numpy(other["entropy"][path]), 1e-6)


def test_gradients_taken_inside_a_forward_are_not_a_recomputation():
    """A penalty on gradients runs a backward in the middle of the forward; calls after it still count."""

    class Penalty(Model):
        def forward(self, x):
            first = self.blocks[0](x)
            (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            return self.blocks[2](self.blocks[1](first)) + slope

    torch.manual_seed(0)
    model = randomize(Penalty("eager"), std=0.3).train()
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            model(inputs()).sum().backward()
        assert [record.calls for record in monitor.coverage()] == [1, 1, 1]


def test_a_recomputation_outside_of_any_step_says_nothing():
    model = make("sdpa", "not reentrant")
    with attnmon.watch(model, **EVERYTHING) as monitor:
        with monitor.step():
            loss = model(inputs()).square().mean()
        loss.backward()
        assert {record.calls for record in monitor.coverage()} == {1}
        loss = model(inputs()).square().mean()
        with monitor.step():
            loss.backward()  # of a forward that was not measured
            model(inputs())
        assert {record.calls for record in monitor.coverage()} == {2}
