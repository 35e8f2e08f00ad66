"""Flex attention: score and mask functions on the sampled rows, against dense float64 attention."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import attnmon
from attnmon.call import make_call
from attnmon.capture.routes.flex import _listed_blocks, mask_of, rows_in_graph
from attnmon.errors import UnsupportedAttention
from attnmon.flex_mods import differs_by_head, mask_rows
from attnmon.stats import reference
from tests.helpers import assert_stats_close, slow_but
from tests.stats.oracle import training_stats

HEADS, KV_HEADS, LENGTH, WIDTH = 4, 2, 24, 32
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

EVERY_ROW = {"rows": None, "sequences": None, "top_n": 4, "on_error": "raise"}


def causal(b, h, q, kv):
    return q >= kv


def sliding(b, h, q, kv):
    return (q >= kv) & (q - kv < 7)


def two_sided(b, h, q, kv):
    return (q - kv).abs() <= 5


DOCUMENT = torch.arange(LENGTH).div(13, rounding_mode="floor").repeat(3, 1)
DOCUMENT[1] = DOCUMENT[1].flip(0)


def documents(b, h, q, kv):
    return (DOCUMENT[b, q] == DOCUMENT[b, kv]) & (q >= kv)


def padded(b, h, q, kv):
    return (q >= kv) & (kv >= 3 * b) & (q >= 3 * b)


def by_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 4 * (h + 1))


SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
RELATIVE = torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(2))


def alibi(score, b, h, q, kv):
    return score - SLOPES[h] * (q - kv).abs()


def softcap(score, b, h, q, kv):
    return 3.0 * torch.tanh(score / 3.0)


def relative_bias(score, b, h, q, kv):
    return score + RELATIVE[h, q - kv + LENGTH]


def by_sequence(score, b, h, q, kv):
    return score * (1.0 + b)


def learned_positions(score, b, h, q, kv):
    return score + (TABLE[q] * TABLE[kv]).sum()  # broadcast index tensors would sum over queries, too


def causal_by_score(score, b, h, q, kv):
    return torch.where(q >= kv, score, float("-inf"))


def causal_by_least(score, b, h, q, kv):
    return torch.where(q - kv < 9 + h, score, torch.finfo(score.dtype).min)


MASKS = (None, causal, sliding, two_sided, documents, padded, by_head)
SCORES = (None, alibi, softcap, relative_bias, by_sequence, learned_positions, causal_by_score, causal_by_least)


def tensors(seed=0, batch=3, kv_heads=KV_HEADS, keys=LENGTH, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, HEADS, LENGTH, 8), (batch, kv_heads, keys, 8), (batch, kv_heads, keys, 5))
    return [torch.randn(shape, generator=generator).to(dtype) * 1.5 for shape in shapes]


def dense_logits(query, key, score_mod, mask_mod, scale):
    """[B, H, Lq, Lk] float64, index by index as flex attention is defined; -inf at hidden keys."""
    group = query.shape[1] // key.shape[1]
    z = query.double() @ key.double().repeat_interleave(group, 1).mT * scale
    for b, h, i in np.ndindex(z.shape[:3]):
        index = [torch.tensor(n) for n in (b, h, i)]
        for j in range(z.shape[3]):
            if score_mod is not None:
                z[b, h, i, j] = score_mod(z[b, h, i, j], *index, torch.tensor(j))
            if mask_mod is not None and not mask_mod(*index, torch.tensor(j)):
                z[b, h, i, j] = float("-inf")
    return z


def dense_stats(query, key, value, score_mod, mask_mod, scale=8**-0.5, **options):
    logits = dense_logits(query, key, score_mod, mask_mod, scale)
    return reference.attention_stats(
        None, None, value, logits=logits, head_dim=query.shape[3], scale=scale, top_n=4, **options
    )


@pytest.mark.parametrize("score_mod", SCORES, ids=lambda f: getattr(f, "__name__", "scores"))
@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda f: getattr(f, "__name__", "all"))
def test_equals_dense_attention(mask_mod, score_mod):
    if mask_mod not in (None, causal, padded, by_head) and score_mod not in (None, relative_bias):
        pytest.skip("each mask and each score function is tried, not each pair")
    query, key, value = tensors(batch=2)
    expected = dense_stats(query, key, value, score_mod, mask_mod)
    call = make_call(query, key, value, score_mod=score_mod, mask_mod=mask_mod)
    actual = training_stats(call, {"top_n": 4, "metrics": tuple(expected)})
    assert_stats_close(actual, expected, 2e-5, atol=2e-6)


def test_lengths_that_differ_and_a_scale():
    query, key, value = tensors(keys=17, kv_heads=1, batch=1)
    expected = dense_stats(query, key, value, alibi, two_sided, scale=0.7)
    call = make_call(query, key, value, score_mod=alibi, mask_mod=two_sided, scale=0.7)
    assert_stats_close(training_stats(call, {"top_n": 4, "metrics": tuple(expected)}), expected, 2e-5, atol=2e-6)


def test_the_mask_is_told_apart_by_head():
    device = torch.device("cpu")
    assert differs_by_head(by_head, device)
    assert not any(differs_by_head(mask, device) for mask in (causal, sliding, documents, padded))
    assert not differs_by_head(flex_module.noop_mask, device)
    with pytest.raises(UnsupportedAttention, match=r"mask_mod that torch\.vmap cannot map"):
        differs_by_head(lambda b, h, q, kv: bool(h) and q >= kv, device)


# -- through the monitor ------------------------------------------------------------------------------------


class FlexAttention(nn.Module):
    """The function as it was imported, or another way to reach it. Training it on a CPU is not possible."""

    def __init__(self, call):
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.call, self.score_mod, self.block_mask = call, relative_bias, None
        self.seen = None

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        q, k, v = self.proj(hidden).detach().split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (x.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for x in (q, k, v))
        out = self.call(q, k, v, score_mod=self.score_mod, block_mask=self.block_mask, enable_gqa=True)
        self.seen = (q, k, v)
        return hidden + out.transpose(1, 2).flatten(2)


def by_name(*args, **kwargs):
    return flex_attention(*args, **kwargs)


def by_module(*args, **kwargs):
    return flex_module.flex_attention(*args, **kwargs)


class Net(nn.Module):
    def __init__(self, call, mask_mod=sliding):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(FlexAttention(call) for _ in range(2))
        mask = None if mask_mod is None else create_block_mask(mask_mod, 3, None, LENGTH, LENGTH, device="cpu")
        for layer in self.layers:
            layer.block_mask = mask

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def hidden_states():
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def check_snapshot(snapshot, net, mask_mod=sliding):
    assert snapshot.modules == ("layers.0", "layers.1")
    for path, layer in zip(snapshot.modules, net.layers, strict=True):
        expected = dense_stats(*layer.seen, layer.score_mod, mask_mod)
        actual = {name: torch.from_numpy(snapshot[name][path]) for name in expected}
        assert_stats_close(actual, expected, 2e-5, atol=2e-6)
        assert snapshot.rows[path].tolist() == [3 * LENGTH] * HEADS


WAYS = {
    "by_name": by_name,
    "by_module": by_module,
    "held": flex_attention,  # no module's namespace that a replacement reaches
    "compiled": torch.compile(flex_attention, backend="eager"),
}


@pytest.mark.parametrize("way", slow_but(("held", "by_name"), WAYS))
def test_every_way_to_call_it(way):
    torch._dynamo.reset()
    net, hidden = Net(WAYS[way]), hidden_states()
    before = net(hidden)
    with attnmon.watch(net, **EVERY_ROW) as monitor:
        for _ in range(2):
            with monitor.step():
                out = net(hidden)
            check_snapshot(monitor.flush(), net)
        assert {record.route for record in monitor.coverage()} == {"flex_attention"}
        assert monitor.flush().excluded["layers.0"].tolist() == [0] * HEADS
    assert torch.equal(out, before)
    assert torch.equal(net(hidden), before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
def test_a_compiled_model_keeps_one_graph(backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net, hidden = Net(by_name), hidden_states()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    before = compiled(hidden)
    with attnmon.watch(net, **EVERY_ROW) as monitor:
        for _ in range(2):
            with monitor.step():
                out = compiled(hidden)
            check_snapshot(monitor.flush(), net)
    assert torch.equal(out, before)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(compiled(hidden), before)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs == 2


def test_the_function_is_put_back():
    net, here = Net(by_name), sys.modules[__name__]
    with attnmon.watch(net, **EVERY_ROW) as monitor:
        with monitor.step():
            assert here.flex_attention is flex_module.flex_attention is not WAYS["held"]
            assert flex_module.flex_attention.__name__ == "flex_attention"
            net(hidden_states())
        assert here.flex_attention is flex_module.flex_attention is WAYS["held"]
        with pytest.raises(ZeroDivisionError), monitor.step():
            raise ZeroDivisionError
        assert here.flex_attention is flex_module.flex_attention is WAYS["held"]


def test_excluded_modules_are_not_measured():
    for call in (by_name, flex_attention):
        torch._dynamo.reset()
        net = Net(call)
        with attnmon.watch(net, exclude="layers.0", **EVERY_ROW) as monitor:
            with monitor.step():
                net(hidden_states())
            assert monitor.flush().modules == ("layers.1",)


def test_sampled_rows_see_keys():
    """The plan spends its rows on queries that see something."""
    net = Net(by_name, padded)
    with attnmon.watch(net, rows=8, sequences=3, top_n=2, on_error="raise") as monitor:
        with monitor.step():
            net(hidden_states())
        snapshot = monitor.flush()
    assert snapshot.rows["layers.0"].tolist() == [24] * HEADS
    assert snapshot.excluded_by_reason["padding"]["layers.0"].tolist() == [9] * HEADS
    assert np.isfinite(snapshot["entropy"]["layers.1"]).all()


def test_a_call_that_cannot_be_honored_is_refused_with_a_reason():
    net = Net(lambda *args, **kwargs: flex_attention(*args, **kwargs, scale=-1.0))
    with attnmon.watch(net) as monitor:
        with pytest.warns(attnmon.AttnmonWarning, match="scale"), monitor.step():
            net(hidden_states())
        assert ["scale must be a positive number" in record.reason for record in monitor.coverage()] == [True, True]


def test_a_block_mask_of_other_lengths_is_refused():
    block_mask = create_block_mask(causal, None, None, 64, 64, device="cpu")
    with pytest.raises(UnsupportedAttention, match="made for lengths 64 x 64"):
        mask_of(block_mask, 40, 64, fused=False)
    assert mask_of(None, 40, 64, fused=False) is None
    assert mask_of(block_mask, 64, 64, fused=False) is causal


@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize("mask_mod", [causal, documents, two_sided, flex_module.noop_mask])
def test_blocks_and_function_agree_where_one_was_made_of_the_other(mask_mod, heads):
    block_mask = create_block_mask(mask_mod, 3, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    index = (torch.arange(3), torch.arange(HEADS), torch.arange(LENGTH).expand(3, -1), torch.arange(LENGTH))
    assert torch.equal(mask_rows(_listed_blocks(block_mask.as_tuple()), *index), mask_rows(mask_mod, *index))


def test_blocks_alone_are_honored_where_the_kernel_is_fused():
    """A block mask made of lists of blocks: its function does not say what is skipped."""
    count, indices = torch.tensor([[[1, 2, 1]]]), torch.tensor([[[[2, 0, 1], [0, 1, 2], [1, 0, 2]]]])
    block_mask = BlockMask.from_kv_blocks(count.int(), indices.int(), BLOCK_SIZE=16, mask_mod=two_sided)
    q, k, v = (x[:, :, :1].expand(-1, -1, 48, -1) for x in tensors())
    logits, positions, _, _ = rows_in_graph(
        (q, k, v, lambda score, b, h, i, j: score, block_mask.as_tuple(), 1.0), 2, 48
    )
    i = torch.arange(48)
    listed = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 1, 0]], dtype=torch.bool)[i[:, None] // 16, i // 16]
    assert positions.tolist() == i.tolist()
    assert torch.equal(logits > -torch.inf, (listed & ((i[:, None] - i).abs() <= 5)).expand(2, HEADS, -1, -1))


def test_rows_of_a_graph_are_spread_evenly():
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    logits, positions, value, scale = rows_in_graph((*tensors(), alibi, block_mask.as_tuple(), 0.25), 2, 8)
    assert positions.tolist() == [1, 4, 7, 10, 13, 16, 19, 22]
    q, k, v = (x[:2] for x in tensors())
    assert torch.equal(value, v)
    expected = dense_logits(q[:, :, positions], k, lambda s, b, h, i, j: alibi(s, b, h, positions[i], j), None, scale)
    expected = expected.masked_fill(~(positions[:, None] >= torch.arange(LENGTH)), -torch.inf)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
