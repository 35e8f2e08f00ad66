"""The streaming implementation against the reference: every branch, every threshold, and what must not matter."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnmon.stats import attention_stats, reference
from attnmon.stats.plan import make_plan
from attnmon.stats.streaming import blocks as blocks_module
from attnmon.stats.streaming import measure as streaming
from attnmon.stats.streaming import softmax_rows as rows
from attnmon.stats.streaming import top_keys as selection
from attnmon.stats.streaming.block_reader import BlockReader
from attnmon.stats.streaming.finite_step import EXPM1_LIMIT
from attnmon.types import AttentionCall
from tests.helpers import MASK_KINDS, assert_stats_close, call_id, draw_call, slow_but
from tests.stats.oracle import as_call, assert_expected, check, counts_of, expect, packed, training_stats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = {
    "mask": "none",
    "padding": "none",
    "window_kind": "none",
    "packed": False,
    "softcap": None,
    "scale": None,
    "with_sinks": False,
    "is_causal": False,
    "fd_epsilon": 0.1,
    "dtype": torch.float32,
}


# ---- agreement with the reference


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", MASK_KINDS)
def test_agrees_with_the_reference(mask, dtype):
    for seed in range(3):
        check(draw_call(1000 + seed, q_len=(5, 11, 17)[seed], mask=mask, dtype=dtype))


@pytest.mark.parametrize("part", slow_but((0,), range(4)))
def test_agrees_with_the_reference_on_random_calls(part):
    for seed in range(part * 50, (part + 1) * 50):
        length = (None, 3, 7, 13)[seed % 4]
        check(draw_call(seed) if length is None else draw_call(seed, q_len=length))


def test_the_oracle_repeats_the_reference():
    for seed in range(8):
        call = draw_call(seed)
        expected = expect(call)
        assert_stats_close(expected.stats, reference.attention_stats(**call), 1e-7)
        assert expected.counts == {name: n.tolist() for name, n in reference.attention_rows(**call).items()}


# ---- past every threshold


@pytest.mark.parametrize("k_len", [271, 272, 273, 280, 511, 512])
@pytest.mark.parametrize("is_causal", [False, True])
def test_key_counts_around_the_chunked_search(k_len, is_causal):
    count = 17
    assert (selection.chunk_size(k_len, count) > 1) == (k_len in (272, 280, 512))
    # queries at the end of a long triangle
    call = draw_call(
        k_len,
        **{**PLAIN, "is_causal": is_causal},
        batch=1,
        heads=2,
        kv_heads=1,
        q_len=40 if is_causal else 6,
        k_len=k_len,
    )
    call["top_n"] = count - 1
    check(call)


@pytest.mark.parametrize("top_n", [1, 2, 16, 20])
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_about_as_long_as_the_selection(top_n, more, masked):
    n = max(1, top_n + more)
    call = draw_call(n, **PLAIN, batch=2, heads=2, kv_heads=1, q_len=3, k_len=n + 5 * masked, top_n=top_n)
    if masked:
        call["attn_mask"] = torch.rand(2, 1, 3, n + 5).argsort(-1).argsort(-1) < n
    expected = check(call)
    assert bool(expected.stats["separability"].isnan().all()) == (n <= top_n)
    assert bool((expected.stats["distance"] == 0).all()) == (n <= top_n)


@pytest.mark.parametrize("top_n", [1, 4, 30])
def test_causal_rows_of_every_length(top_n):
    check(draw_call(5, **{**PLAIN, "is_causal": True}, batch=1, heads=2, kv_heads=2, q_len=65, k_len=65, top_n=top_n))


def test_many_queries_of_few_keys_and_few_of_many():
    check(draw_call(6, **PLAIN, batch=1, heads=1, kv_heads=1, q_len=700, k_len=9, top_n=4))
    check(draw_call(7, **PLAIN, batch=1, heads=2, kv_heads=1, q_len=3, k_len=4100, top_n=16))


@pytest.mark.parametrize("budget", [1, 64, 1000])
def test_blocks_of_any_size_give_the_same(monkeypatch, budget):
    calls = [draw_call(seed, q_len=9) for seed in range(8)]
    calls.append(draw_call(12, **PLAIN, batch=3, heads=6, kv_heads=2, q_len=9, k_len=9))
    calls.append(draw_call(13, **{**PLAIN, "mask": "bool_head"}, batch=2, heads=4, kv_heads=4, q_len=9, k_len=9))
    whole = [packed(call)[1] for call in calls]
    monkeypatch.setattr(blocks_module, "BLOCK_CPU", budget)
    for call, expected in zip(calls, whole, strict=True):
        packing, matrix = packed(call)
        counts = [0, 1, 2, 3, *range(packing.first_mean + 1, packing.num_sums, 2)]
        assert np.array_equal(matrix[counts], expected[counts]), call_id(call)
        np.testing.assert_allclose(matrix, expected, rtol=2e-6, atol=1e-6, err_msg=call_id(call))


@pytest.mark.parametrize("window", [None, 40, (100, 3), (None, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranges_of_rows_that_see_few_keys(monkeypatch, window, is_causal):
    """Long rows under a triangle or a window: blocks of rows read a range of keys only."""
    options = {**PLAIN, "is_causal": is_causal, "with_sinks": True}
    call = draw_call(1, **options, batch=2, heads=2, kv_heads=1, q_len=280, k_len=280, window=window, top_n=4)
    padding = torch.arange(280)[None] < torch.tensor([[0], [45]])
    by_mask = {name: given for name, given in call.items() if name not in ("is_causal", "window")}
    ahead = torch.arange(280)[None] - torch.arange(280)[:, None]
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (None, None)
    seen = torch.ones(280, 280, dtype=torch.bool)
    seen &= (ahead <= 0) if is_causal else seen
    seen &= (ahead >= -left) if left is not None else seen
    seen &= (ahead <= right) if right is not None else seen
    by_mask["attn_mask"] = seen & ~padding[:, None, None]
    call["key_padding_mask"] = padding
    expected = attention_stats(**by_mask)
    for budget in (20000, 1 << 19):
        monkeypatch.setattr(blocks_module, "BLOCK_CPU", budget)
        assert_stats_close(attention_stats(**call), expected, 1e-6)
        assert_stats_close(training_stats(call), expected, 1e-5, metric_rtol={"separability": 1e-3})


def test_given_logits_in_blocks_of_a_head(monkeypatch):
    """Heads whose rows see different keys, the first of them all: no head takes another's visibility."""
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(2, 3, 8, 20, generator=generator)
    z[:, 1:] = z[:, 1:].masked_fill(torch.rand(2, 2, 8, 20, generator=generator) < 0.5, -math.inf)
    call = AttentionCall(None, None, None, scale=0.25, head_dim=16, logits=z, is_cross=True)
    names = {"metrics": ["entropy", "jacobian_fd"]}
    expected = reference.attention_stats(None, None, logits=z, head_dim=16, scale=0.25, is_cross=True, **names)
    for budget in (1, 160, 10**6):
        monkeypatch.setattr(blocks_module, "BLOCK_CPU", budget)
        assert_stats_close(training_stats(call, names), expected, 1e-5)


@pytest.mark.parametrize("gathered", [False, True])
def test_given_logits_with_a_row_that_is_not_finite(gathered):
    """Such a block is reduced a second time, from the logits as they came."""
    generator = torch.Generator().manual_seed(5)
    z = 3.0 * torch.randn(1, 2, 6, 40, generator=generator)
    z[0, 1, 2, 5] = math.nan
    given = z.clone()
    call = AttentionCall(None, None, None, scale=0.25, head_dim=16, logits=given, is_cross=True)
    settings = streaming.Settings.create(
        rows=6, sequences=None, metrics=["max_logit", "logit_std", "entropy", "jacobian"]
    )
    plan, packing = make_plan(call, settings), streaming.Packing(settings.metrics)
    plan.gathered = gathered
    found = packing.values(streaming.measure(call, settings, plan, packing).numpy())
    expected = reference.attention_stats(
        None, None, logits=z, head_dim=16, scale=0.25, is_cross=True, metrics=settings.metrics
    )
    assert_stats_close({name: torch.from_numpy(value) for name, value in found.items()}, expected, 1e-5)
    assert torch.equal(given.nan_to_num(0.0), z.nan_to_num(0.0))  # the caller's tensor is left as it was


def test_blocks_cover_every_row_once(monkeypatch):
    for budget in (1, 30, 64, 500, 1000, 10**6):
        monkeypatch.setattr(blocks_module, "BLOCK_CPU", budget)
        call = as_call(draw_call(0, **PLAIN, batch=3, heads=6, kv_heads=2, q_len=7, k_len=10))
        settings = streaming.Settings.create(rows=None, sequences=None)
        plan = streaming.Plan(slice(0, 3), torch.arange(7).expand(3, 7), None, None, None, None)
        reader = BlockReader(call, settings, plan, torch.float32)
        seen = torch.zeros(3, 6, 7)
        for block in reader.blocks():
            seen[block.sequences, block.heads, block.rows] += 1
            assert block.heads.start % 3 == block.heads.stop % 3 == 0  # whole groups
            logits = seen[block.sequences, block.heads, block.rows].numel() * 10
            assert logits <= max(budget, 30)  # one group of one row is the least
        assert bool((seen == 1).all())


def _from_logits(z, x=None, **options):
    """A call of batch 1 and one head whose logits are those of z [R, n] exactly: unit keys, scale 1."""
    n = z.shape[-1]
    call = {"query": z[None, None].float(), "key": torch.eye(n)[None, None], "scale": 1.0, **options}
    if x is not None:
        call["value"] = x[None, None].float()
    return call


@pytest.mark.parametrize("gap", [5.0, 30.0, 60.0])
@pytest.mark.parametrize("n", [2, 3, 40, 400])
def test_one_hot_rows_keep_their_relative_accuracy(gap, n):
    generator = torch.Generator().manual_seed(n)
    z = torch.randn(4, n, generator=generator) - gap
    z[torch.arange(4), torch.randint(n, (4,), generator=generator)] = 0.5
    call = _from_logits(z, torch.randn(n, 6, generator=generator), top_n=2)
    call["attn_mask"] = torch.zeros(4, n)  # the route with a bias
    check({**call, "fd_epsilon": 1e-3})
    check({**call, "fd_epsilon": 10.0, "metrics": ["jacobian_fd"]})


def _unit(generator, *shape):
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)


def test_rows_whose_least_excess_is_not_negative():
    """Outsiders on the far side of s: the zeros of the selected and the masked keys stand below every excess."""
    generator = torch.Generator().manual_seed(1)
    n, top_n = 60, 3
    x = _unit(generator, n, 8).abs()
    x[top_n:] *= -1.0
    z = torch.cat([torch.full((5, top_n), 3.0), torch.zeros(5, n - top_n)], -1) + 0.1 * torch.randn(
        5, n, generator=generator
    )
    call = _from_logits(z, x, top_n=top_n)
    p = z.double().softmax(-1)[..., None] * x.double()
    s = p[:, :top_n].sum(1, keepdim=True)
    assert bool(((p * (p - 2 * s)).sum(-1)[:, top_n:] > 0).all())
    expected = check(call)
    assert float(expected.stats["separability"]) == 1.0
    mask = torch.ones(5, n, dtype=torch.bool)
    mask[:, 50:] = False
    check({**call, "attn_mask": mask})
    # a selected key with an excess above 0 and below every outsider's
    raw = x.clone()
    raw[2] = -0.5 * raw[0]
    raw[top_n:] = -40.0 * raw[0]
    for given in ({}, {"attn_mask": mask}):
        expected = check({**call, **given, "value": raw[None, None], "tokens": "value_raw"})
        assert float(expected.stats["separability"]) == 1.0


@pytest.mark.parametrize("nearness", [1e-1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("where", ["near", "tail"])
def test_an_outsider_almost_at_s(nearness, masked, where):
    """Two nearly opposite selected vectors leave a small s; one outsider's p x is that, up to ``nearness``."""
    generator = torch.Generator().manual_seed(3)
    n, width, top_n = 10, 8, 2
    third = 2 if where == "near" else n - 1
    for _ in range(4):
        z = torch.full((n,), -4.0) + 0.2 * torch.randn(n, generator=generator)
        z[:2] = torch.tensor([1.0, 0.9])
        if where == "tail":
            z[2:8] += 2.0  # so that the K largest do not reach the outsider
        z[third] = -2.5
        p = z.double().softmax(-1)
        x = _unit(generator, n, width).double()
        aim = p[third] * x[third]
        x[0] = _unit(generator, width)
        x[1] = (aim - p[0] * x[0]) / p[1]  # raw values: s is aim
        x[third] += nearness * _unit(generator, width)
        call = _from_logits(z[None], x, top_n=top_n, tokens="value_raw")
        if masked:
            call["attn_mask"] = torch.arange(n)[None] != 8
        check(call)


@pytest.mark.parametrize("nearness", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("nearer", [0.99, 1.01])
@pytest.mark.parametrize("where", ["near", "tail"])
def test_a_selected_key_and_an_outsider_almost_at_s(nearness, nearer, where):
    """The first key is s up to the short second one; an outsider lies 1 % nearer or farther."""
    generator = torch.Generator().manual_seed(6)
    n, width, top_n = 12, 8, 2
    third = 2 if where == "near" else n - 1
    z = torch.linspace(1.0, 0.0, n)
    p = z.double().softmax(-1)
    x = 0.01 * _unit(generator, n, width).double()  # everyone else: at |s|
    x[0] = _unit(generator, width)
    x[1] = nearness * p[0] / p[1] * _unit(generator, width)
    s = p[0] * x[0] + p[1] * x[1]
    x[third] = (s + nearer * nearness * p[0] * _unit(generator, width)) / p[third]
    expected = check(_from_logits(z[None], x, top_n=top_n, tokens="value_raw"))
    assert float(expected.stats["separability"]) == (0.5 if nearer > 1 else 0.0)
    low, high = expected.separability
    assert torch.equal(low, high)  # no tie: it has to be got right


def test_identical_opposite_and_zero_value_vectors():
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(6, 25, generator=generator)
    direction = _unit(generator, 1, 5)
    signs = torch.randn(25, 1, generator=generator).sign()
    zeros = _unit(generator, 25, 5) * (torch.rand(25, 1, generator=generator) < 0.5)
    for x in (direction * signs, zeros, torch.zeros(25, 5)):
        for top_n in (1, 2, 8):
            check(_from_logits(z, x, top_n=top_n))
    # the same everywhere: distances differ by weight alone
    check(_from_logits(z, direction.expand(25, 5), top_n=4))


def test_tiny_and_huge_value_vectors():
    call = draw_call(3, **PLAIN, q_len=9, k_len=40, top_n=4, heads=2, kv_heads=1)
    plain = training_stats(call)
    for factor in (1e-15, 1e15):
        scaled = training_stats({**call, "value": call["value"] * factor})
        assert_stats_close(scaled, plain, 1e-5)


def test_ties_select_the_lowest_index():
    """Zero queries: all keys tie, and the first N are selected, whatever the values."""
    for k_len in (24, 25, 272, 300):
        for mask in ("none", "bool"):
            call = draw_call(k_len, **{**PLAIN, "mask": mask}, batch=1, heads=2, kv_heads=1, q_len=5, k_len=k_len)
            call["query"] = torch.zeros_like(call["query"])
            expected = check({**call, "top_n": 5})
            assert float(expected.allowed["distance"].max()) < 1e-3


def test_repeated_keys():
    """Each key four times over, with the same value: the selection cuts through ties that do not matter."""
    call = draw_call(9, **PLAIN, batch=2, heads=2, kv_heads=1, q_len=6, k_len=16)
    for name in ("key", "value"):
        call[name] = call[name].repeat_interleave(4, 2)
    for top_n in (1, 2, 4, 6, 16):
        check({**call, "top_n": top_n})


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("hide", [None, -math.inf, -1e9, "min"])
def test_given_logits(dtype, hide):
    """The eager route: rounded logits tie exactly, masked ones carry the mask's magnitude."""
    generator = torch.Generator().manual_seed(8)
    for k_len, top_n in ((33, 4), (33, 16), (272, 16), (5, 2)):
        z = (torch.randn(2, 4, 7, k_len, generator=generator) * 2.0).to(dtype)
        if hide is not None:
            level = torch.finfo(dtype).min if hide == "min" else hide
            level = level if dtype != torch.float16 or hide != -1e9 else torch.finfo(dtype).min
            hidden = torch.rand(2, 1, 7, k_len, generator=generator) < 0.4
            z = torch.where(hidden, (z.float() + level).clamp(min=torch.finfo(dtype).min).to(dtype), z)
            if hide == -math.inf:
                z = z.masked_fill(hidden, -math.inf)
        value = torch.randn(2, 2, k_len, 6, generator=generator).to(dtype)
        options = {"top_n": top_n, "is_cross": True}
        call = AttentionCall(None, None, value, scale=0.25, head_dim=16, logits=z, is_cross=True)
        expected = expect({**options, "query": None, "logits": z, "head_dim": 16, "scale": 0.25, "value": value})
        names = {"metrics": list(expected.stats), "top_n": top_n}
        for how in (torch.float32, torch.float64):
            actual = training_stats(call, names, dtype=how)
            assert_expected(actual, expected, 1e-5, f"{k_len} {top_n} {how}", exact=how == torch.float64)
        packing, matrix = packed(call, names)
        assert counts_of(packing, matrix) == expected.counts


@pytest.mark.parametrize("ratio", [0.99, 1.01, 4.0, 40.0, 3000.0])
@pytest.mark.parametrize("sink", [None, 2.0, -math.inf, 30.0])
def test_steps_around_the_expm1_limit(ratio, sink):
    assert EXPM1_LIMIT == 1.0
    for q_len, k_len in ((5, 1), (5, 2), (7, 40)):
        call = draw_call(1, **{**PLAIN, "fd_epsilon": 2.0}, q_len=q_len, k_len=k_len, heads=2, kv_heads=1, head_dim=16)
        call["scale"] = ratio / (2.0 * 4.0)  # tau = 1 / (4 scale)
        call["query"] = call["query"] / call["scale"]
        if sink is not None:
            call["sinks"] = torch.tensor([sink, sink + 1.0])
        check(call)


@pytest.mark.parametrize("lead", [-math.inf, -2000.0, -60.0, 0.0, 3.0, 8.0, 15.0, 30.0, 50.0, 75.0])
@pytest.mark.parametrize("k_len", [1, 40])
def test_sinks_of_any_size(lead, k_len):
    call = draw_call(2, **PLAIN, batch=1, heads=2, kv_heads=1, q_len=4, k_len=k_len, top_n=4)
    check({**call, "sinks": torch.tensor([lead, lead + 0.3])})


@pytest.mark.parametrize("lead", [100.0, 1000.0])
def test_sinks_that_leave_nothing(lead):
    """Weights are held at e^-80 of the sink's: as good as none."""
    call = draw_call(2, **PLAIN, batch=1, heads=2, kv_heads=1, q_len=4, k_len=40, top_n=4)
    call["sinks"] = torch.tensor([lead, lead + 0.3])
    expected = expect(call)
    for actual in (attention_stats(**call), training_stats(call)):
        for name in ("sink_mass", "max_logit", "logit_std"):
            torch.testing.assert_close(actual[name], expected.stats[name], rtol=1e-5, atol=0.0)
        for name in ("entropy", "max_prob", "top_mass", "jacobian", "jacobian_max", "jacobian_fd", "distance"):
            assert bool((actual[name] < 1e-15).all() and (actual[name] >= 0).all()), name


def test_softcap_past_saturation():
    for softcap in (5.0, 50.0):
        check(draw_call(4, **{**PLAIN, "softcap": softcap}, sharpness=30.0, q_len=9, k_len=33, top_n=4))
    call = draw_call(4, **{**PLAIN, "softcap": 0.5}, sharpness=30.0, q_len=9, k_len=33)
    del call["value"]  # saturated logits tie up to the rounding of tanh: which are selected is chance
    check(call)


# ---- the branches of other devices


@pytest.fixture
def elsewhere(monkeypatch):
    """As on a device where asking for a number costs a wait."""
    monkeypatch.setattr(BlockReader, "on_cpu", property(lambda self: False, lambda self, value: None), raising=False)

    def sorted_search(values, *arguments):
        device = SimpleNamespace(type="cuda")
        return selection.largest(SimpleNamespace(device=device, sort=values.sort), *arguments)

    monkeypatch.setattr(rows, "largest", sorted_search)


@pytest.mark.usefixtures("elsewhere")
def test_branches_of_other_devices_agree_with_the_reference():
    for seed in range(40):
        check(draw_call(3000 + seed, q_len=(3, 7, 13, 17)[seed % 4]))


@pytest.mark.usefixtures("elsewhere")
def test_blocks_of_other_devices(monkeypatch):
    calls = [draw_call(seed, q_len=9) for seed in range(8)]
    whole = [packed(call)[1] for call in calls]
    monkeypatch.setattr(blocks_module, "BLOCK_OTHER", 100)
    for call, expected in zip(calls, whole, strict=True):
        np.testing.assert_allclose(packed(call)[1], expected, rtol=2e-6, atol=1e-6, err_msg=call_id(call))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "case",
    [
        test_ties_select_the_lowest_index,
        test_repeated_keys,
        test_identical_opposite_and_zero_value_vectors,
        test_rows_whose_least_excess_is_not_negative,
        test_softcap_past_saturation,
    ],
)
def test_edge_cases_on_other_devices(case):
    case()
