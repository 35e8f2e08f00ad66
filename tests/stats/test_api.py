"""The public function: what it refuses, what garbage cannot move, and what must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from attnmon.errors import AttnmonError
from attnmon.metrics import METRICS
from attnmon.stats import attention_stats, reference
from attnmon.stats.packing import Packing
from attnmon.stats.streaming import scratch
from tests.helpers import assert_stats_close, call_id, draw_call
from tests.stats.oracle import counts_of, packed, training_stats

PLAIN = {
    "mask": "none",
    "padding": "none",
    "window_kind": "none",
    "packed": False,
    "softcap": None,
    "with_sinks": False,
    "dtype": torch.float32,
    "fd_epsilon": 0.1,
}
WAYS = [lambda call: attention_stats(**call), training_stats]
ways = pytest.mark.parametrize("measured", WAYS, ids=["float64", "float32"])
# one comparison that rounding turns moves a head's separability by 1 / (N rows)
ROUNDED = {"metric_rtol": {"separability": 2e-2}}


def _call(seed=0, **options):
    return draw_call(
        seed, **{**PLAIN, "batch": 2, "heads": 4, "kv_heads": 2, "q_len": 20, "k_len": 20, "top_n": 4, **options}
    )


# ---- refusals

Q = torch.zeros(2, 4, 6, 8)
K = torch.zeros(2, 2, 6, 8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": ["entropi"]}, "'entropi'; accepted are: entropy, "),
        ({"metrics": "nothing"}, "accepted are: entropy, "),
        ({"metrics": []}, "at least one of: entropy, "),
        ({"backend": "cuda"}, "'auto', 'torch', 'triton'; got 'cuda'"),
        ({"tokens": "keys"}, "'value', 'value_raw', 'hidden'; got 'keys'"),
        ({"rows": 0}, "rows must be a whole number of at least 1 or None"),
        ({"rows": True}, "rows must be a whole number of at least 1"),
        ({"rows": 2.0}, "rows must be a whole number of at least 1"),
        ({"sequences": -1}, "sequences must be a whole number of at least 1 or None"),
        ({"top_n": 0}, "top_n must be a whole number of at least 1; got 0"),
        ({"top_n": None}, "top_n must be a whole number of at least 1; got None"),
        ({"top_n": True}, "top_n must be a whole number of at least 1"),
        ({"fd_epsilon": 0.0}, "fd_epsilon must be a finite number > 0"),
        ({"fd_epsilon": math.nan}, "fd_epsilon must be a finite number > 0"),
        ({"fd_epsilon": math.inf}, "fd_epsilon must be a finite number > 0"),
        ({"fd_epsilon": True}, "fd_epsilon must be a finite number > 0"),
        ({"scale": 0.0}, "scale must be a positive number"),
        ({"scale": -1.0}, "scale must be a positive number"),
        ({"scale": math.nan}, "scale must be a positive number"),
        ({"scale": math.inf}, "scale must be a positive"),
        ({"softcap": 0.0}, "softcap must be a positive number or None"),
        ({"softcap": math.inf}, "softcap must be a positive"),
        ({"window": 0}, "window must be at least 1"),
        ({"window": True}, "window must be an int or a pair"),
        ({"window": (1, 2, 3)}, r"window must be an int or a pair \(left, right\)"),
        ({"window": "big"}, "window must be an int or a pair"),
        ({"sinks": torch.zeros(2)}, r"one logit per query head, \[4\]; got \[2\]"),
        ({"attn_mask": torch.zeros(6, 6, dtype=torch.int64)}, r"attn_mask must be bool \(True = visible\) or float"),
        ({"attn_mask": torch.zeros(6, 5)}, r"attn_mask must broadcast to \[2, 4, 6, 6\]; got \[1, 1, 6, 5\]"),
        ({"attn_mask": torch.zeros(2, 2, 6, 6)}, "attn_mask must broadcast to"),
        ({"attn_mask": torch.zeros(1, 2, 4, 6, 6)}, "attn_mask must broadcast to"),
        ({"key_padding_mask": torch.zeros(2, 5)}, r"key_padding_mask must be \[2, 6\]; got \[2, 5\]"),
        ({"key_padding_mask": torch.zeros(2, 6, dtype=torch.int64)}, "key_padding_mask must be bool"),
        ({"cu_seqlens": torch.tensor([0, 6])}, "B = 1, Lq == Lk"),
        ({"tokens": "hidden", "metrics": "distance"}, r"distance with tokens='hidden' need hidden="),
        ({"hidden": torch.zeros(2, 5, 3)}, r"hidden must be \[2, 6, E\]; got \[2, 5, 3\]"),
        ({"value": None, "metrics": ["separability", "entropy"]}, r"separability with tokens='value' need value="),
        ({"value": torch.zeros(2, 2, 5, 8)}, r"value must be \[2, 2, 6\] \+ \[Dv\]"),
        ({"value": torch.zeros(2, 4, 6, 8)}, "value must be"),
        ({"key": torch.zeros(2, 3, 6, 8)}, "multiple of key heads; got 4 and 3"),
        ({"key": torch.zeros(2, 2, 6, 7)}, r"key must be \[2, Hkv, Lk, 8\]"),
        ({"key": torch.zeros(1, 2, 6, 8)}, "key must be"),
        ({"key": torch.zeros(2, 2, 0, 8), "value": None}, "must not be empty"),
        ({"query": torch.zeros(4, 6, 8)}, r"query must have 4 axes \[B, heads, L, D\]"),
        ({"query": Q.long()}, "query must be of a float dtype"),
        ({"key": None}, "key must be a tensor"),
    ],
    ids=lambda given: "-".join(f"{name}" for name in given) if isinstance(given, dict) else None,
)
def test_refused_with_what_is_accepted(options, says):
    with pytest.raises(AttnmonError, match=says):
        attention_stats(**{"query": Q, "key": K, "value": K, **options})


def test_packed_boundaries_are_checked():
    q = torch.zeros(1, 2, 6, 8)
    for bad in (torch.tensor([0.0, 6.0]), torch.tensor([0]), torch.tensor([[0, 6]])):
        with pytest.raises(AttnmonError, match=r"cu_seqlens must be int \[documents \+ 1\]"):
            attention_stats(q, q, cu_seqlens=bad)
    with pytest.raises(AttnmonError, match="no padding"):
        attention_stats(q, q, cu_seqlens=torch.tensor([0, 6]), key_padding_mask=torch.zeros(1, 6))


def test_metrics_follow_the_arguments_and_the_table():
    assert list(attention_stats(Q, K)) == [name for name, metric in METRICS.items() if not metric.needs]
    everything = attention_stats(Q, K, K, sinks=torch.zeros(4), softcap=5.0)
    assert list(everything) == list(METRICS)
    assert list(attention_stats(Q, K, metrics=("max_prob", "entropy"))) == ["entropy", "max_prob"]
    assert all(value.shape == (4,) and value.dtype == torch.float32 for value in everything.values())
    asked = attention_stats(Q, K, metrics=["sink_mass", "max_logit_uncapped"])
    assert {name: value.tolist() for name, value in asked.items()} == {
        "sink_mass": [0.0] * 4,
        "max_logit_uncapped": [0.0] * 4,
    }


def test_a_metric_alone_is_what_it_is_among_all():
    call = _call(sinks=torch.randn(4), softcap=9.0)
    everything = attention_stats(**call)
    for name in METRICS:
        assert torch.equal(attention_stats(**call, metrics=name)[name], everything[name]), name


@pytest.mark.parametrize("tokens", ["value_raw", "hidden"])
def test_token_choices(tokens):
    call = {**_call(), "tokens": tokens, "hidden": torch.randn(2, 20, 30)}
    assert_stats_close(attention_stats(**call), reference.attention_stats(**call), 1e-5)
    assert_stats_close(attention_stats(**call, rows=100, sequences=5), reference.attention_stats(**call), 1e-5)


# ---- garbage


@ways
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("kind", ["key_padding", "bool", "float", "window"])
def test_garbage_in_masked_keys_moves_nothing(measured, garbage, kind):
    call = _call(1)
    hidden = torch.zeros(20, dtype=torch.bool)
    hidden[[0, 7, 8, 19]] = True
    if kind == "key_padding":
        call["key_padding_mask"] = hidden.expand(2, 20)
    elif kind == "bool":
        call["attn_mask"] = ~hidden.expand(20, 20)
    elif kind == "float":
        call["attn_mask"] = torch.randn(20, 20).masked_fill(hidden, -math.inf)
    else:
        call["window"] = (None, -1)
        call["is_causal"], hidden = True, torch.arange(20) >= 12
        call["query"] = call["query"][:, :, :12]
    for name, tokens in (("key", "value"), ("value", "value"), ("value", "value_raw")):
        clean = {**call, "tokens": tokens}
        dirty = {**clean, name: call[name].masked_fill(hidden[:, None], garbage)}
        assert_stats_close(measured(dirty), measured(clean), 1e-5, **ROUNDED)
        assert counts_of(*packed(dirty)) == counts_of(*packed(clean))


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_rows_that_see_a_logit_that_is_not_finite_are_counted(garbage):
    call = _call(2, is_causal=True)
    clean = {**call, **{name: call[name][:, :, :13] for name in ("query", "key", "value")}}
    call["key"] = call["key"].clone()
    call["key"][:, 0, 13] = garbage  # seen by queries 13 ... 19 of heads 0 and 1
    counts = counts_of(*packed(call))
    assert counts == {"rows": [26, 26, 40, 40], "padding": [0] * 4, "masked": [0] * 4, "nonfinite": [14, 14, 0, 0]}
    assert {name: n.tolist() for name, n in reference.attention_rows(**call).items()} == counts
    for dirty, expected in (
        (attention_stats(**call), attention_stats(**clean)),
        (training_stats(call), training_stats(clean)),
    ):
        assert_stats_close(
            {n: x[:2] for n, x in dirty.items()}, {n: x[:2] for n, x in expected.items()}, 1e-5, **ROUNDED
        )


def test_a_broken_value_vector_takes_away_geometry_alone():
    for garbage in (math.nan, math.inf):
        call = _call(3, is_causal=True)
        expected = attention_stats(**call)
        short = attention_stats(**{**call, **{name: call[name][:, :, :13] for name in ("query", "key", "value")}})
        call["value"] = call["value"].clone()
        call["value"][:, 0, 13] = garbage
        for actual in (attention_stats(**call), training_stats(call)):
            for name, value in actual.items():
                whole = short if METRICS[name].needs == "value" else expected
                torch.testing.assert_close(value[:2], whole[name][:2], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(value[2:], expected[name][2:], rtol=1e-5, atol=1e-6)
        assert counts_of(*packed(call))["nonfinite"] == [0] * 4


def test_a_broken_sink_excludes_its_head():
    call = _call(4, sinks=torch.tensor([0.0, math.nan, math.inf, -math.inf]))
    counts = counts_of(*packed(call))
    assert counts["nonfinite"] == [0, 40, 40, 0]
    assert counts == {name: n.tolist() for name, n in reference.attention_rows(**call).items()}
    assert_stats_close(attention_stats(**call), reference.attention_stats(**call), 1e-5)


def test_rows_and_exclusions_add_up():
    for seed in range(30):
        call = draw_call(seed)
        if seed % 3 == 0:
            call["query"] = call["query"].clone()
            call["query"][:, 0, ::2] = math.nan
        counts = counts_of(*packed(call))
        total = call["query"].shape[0] * call["query"].shape[2]
        assert np.array_equal(sum(np.array(n) for n in counts.values()), [total] * call["query"].shape[1])
        assert counts == {name: n.tolist() for name, n in reference.attention_rows(**call).items()}, call_id(call)


def test_fp16_overflow_is_not_an_overflow_here():
    q = torch.full((1, 1, 4, 64), 300.0, dtype=torch.float16)
    assert attention_stats(q, q)["max_logit"].item() == pytest.approx(300.0**2 * 8)


# ---- invariances


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", ["key_padding_mask", "attn_mask"])
def test_padding_moves_no_metric(side, rows, is_causal, how):
    call = {**_call(5, is_causal=is_causal), "rows": rows, "sequences": None}
    extra = (0, 0, 7, 0) if side == "left" else (0, 0, 0, 7)
    padded = {**call, **{name: pad(call[name], extra, value=math.nan) for name in ("query", "key", "value")}}
    padding = pad(torch.zeros(2, 20, dtype=torch.bool), extra[2:], value=True)
    padded[how] = padding if how == "key_padding_mask" else ~padding[:, None, None]
    assert_stats_close(attention_stats(**padded), attention_stats(**call), 1e-6)
    for draw in range(3):
        assert_stats_close(training_stats(padded, draw=draw), training_stats(call, draw=draw), 1e-5, **ROUNDED)
    assert counts_of(*packed(padded))["padding"] == [14] * 4


@ways
def test_heads_in_another_order(measured):
    call = _call(6, kv_heads=4, sinks=torch.randn(4), attn_mask=torch.rand(2, 4, 20, 20) < 0.7)
    order = torch.tensor([2, 0, 3, 1])
    moved = {**call, **{name: call[name][:, order] for name in ("query", "key", "value", "attn_mask")}}
    moved["sinks"] = call["sinks"][order]
    assert_stats_close(measured(moved), {name: value[order] for name, value in measured(call).items()}, 1e-6)


def test_two_batches_merge_into_one():
    for seed in range(12):
        call = draw_call(seed, batch=3, packed=False)
        per_sequence = [name for name in ("query", "key", "value", "key_padding_mask") if name in call]
        if call.get("attn_mask", torch.empty(0)).dim() == 4 and call["attn_mask"].shape[0] == 3:
            per_sequence.append("attn_mask")
        parts = [{**call, **{name: call[name][piece] for name in per_sequence}} for piece in (slice(0, 1), slice(1, 3))]
        packing, whole = packed(call)
        merged = packing.merge(np.stack([packed(part)[1] for part in parts]))
        np.testing.assert_allclose(merged, whole, rtol=1e-5, atol=1e-5, err_msg=call_id(call))
        assert isinstance(packing, Packing)


def test_scaling_values_leaves_separability():
    call = {**_call(7), "tokens": "value_raw"}
    scaled = {**call, "value": call["value"] * 64.0}  # exact in binary
    for before, after in (
        (attention_stats(**call), attention_stats(**scaled)),
        (training_stats(call), training_stats(scaled)),
    ):
        assert torch.equal(before["separability"], after["separability"])
        torch.testing.assert_close(after["distance"], before["distance"] * 64.0)


def test_strides_do_not_matter():
    call = _call(8, attn_mask=torch.rand(2, 1, 20, 20) < 0.7)
    strided = dict(call)
    for name in ("query", "key", "value"):
        wide = torch.full((2, 20, call[name].shape[1], 2 * call[name].shape[3]), math.nan)
        wide[..., ::2] = call[name].transpose(1, 2)
        strided[name] = wide[..., ::2].transpose(1, 2)
    strided["attn_mask"] = call["attn_mask"].expand(2, 4, 20, 20)
    strided["value"] = strided["value"][:, :1].expand(-1, 2, -1, -1)
    call["value"] = call["value"][:, :1].repeat(1, 2, 1, 1)
    assert_stats_close(attention_stats(**strided), attention_stats(**call), 1e-6)
    assert_stats_close(training_stats(strided), training_stats(call), 1e-6, **ROUNDED)


def test_inputs_keep_their_graph_and_the_result_has_none():
    call = _call(9, sinks=torch.randn(4), attn_mask=torch.randn(20, 20))
    before = {name: given.clone() for name, given in call.items() if isinstance(given, torch.Tensor)}
    leaves = {name: call[name].clone().requires_grad_() for name in before}
    result = attention_stats(**{**call, **leaves})
    assert not any(value.requires_grad for value in result.values())
    assert all(leaf.grad is None and leaf.requires_grad and leaf._version == 0 for leaf in leaves.values())
    assert all(torch.equal(leaves[name], given) for name, given in before.items())
    assert_stats_close(result, attention_stats(**call), 0.0, atol=1e-12)


@pytest.fixture
def restored():
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("context", ["autocast", "float64", "bfloat16", "inference", "deterministic", "no_grad"])
@pytest.mark.parametrize("seed", [0, 3, 4, 9])
def test_surroundings_do_not_matter(context, seed):
    call = draw_call(seed, dtype=torch.bfloat16 if seed == 3 else torch.float32)
    call = {**call, "rows": 5, "sequences": 2}
    expected, trained = attention_stats(**call), training_stats(call)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    if context in ("float64", "bfloat16"):
        torch.set_default_dtype(getattr(torch, context))
        actual, training = attention_stats(**call), training_stats(call)
    elif context == "deterministic":
        torch.use_deterministic_algorithms(True)
        actual, training = attention_stats(**call), training_stats(call)
    else:
        around = {
            "autocast": torch.autocast("cpu", torch.bfloat16),
            "inference": torch.inference_mode(),
            "no_grad": torch.no_grad(),
        }[context]
        with around:
            actual, training = attention_stats(**call), training_stats(call)
    for name in expected:
        for got, want in ((actual, expected), (training, trained)):
            assert got[name].dtype == torch.float32
            assert torch.equal(got[name].nan_to_num(-7.0), want[name].nan_to_num(-7.0)), name
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_device_does_not_matter(monkeypatch):
    monkeypatch.setattr(scratch, "_buffers", scratch._Buffers())  # as in a thread that has measured nothing yet
    q, k, v = torch.randn(3, 2, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    expected = attention_stats(q, k, v, is_causal=True, top_n=4)
    monkeypatch.setattr(scratch, "_buffers", scratch._Buffers())
    with torch.device("meta"):
        found = attention_stats(q, k, v, is_causal=True, top_n=4)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
