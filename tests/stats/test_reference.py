"""The reference against closed forms, against PyTorch's own attention and against independent dense formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnmon.errors import AttnmonError
from attnmon.stats.directions import TABLE_SIZE, direction_start, direction_table
from attnmon.stats.reference import (
    attention_rows,
    attention_stats,
    largest_eigenvalue,
    row_stats,
    secular_eigenvalue,
    softmax_row,
)
from tests.helpers import assert_stats_close, call_id, draw_call

# ---- closed forms


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 1000])
def test_uniform_row(n):
    stats = row_stats(np.zeros(n), top_n=2)
    assert stats["entropy"] == pytest.approx(math.log(n), rel=1e-14)
    assert stats.get("entropy_norm", 1.0) == pytest.approx(1.0, rel=1e-14)
    assert stats["max_prob"] == stats["first_mass"] == pytest.approx(1 / n)
    assert stats["top_mass"] == pytest.approx(min(2, n) / n)
    assert stats["logit_std"] == stats["max_logit"] == stats["sink_mass"] == 0.0
    assert stats["jacobian"] == pytest.approx(1 / n if n > 1 else 0.0)
    assert ("entropy_norm" in stats) == (n >= 2)


@pytest.mark.parametrize("n", [2, 100])
def test_one_hot_row(n):
    z = np.full(n, -2000.0)
    z[1] = 0.0
    stats = row_stats(z, np.eye(n), top_n=1)
    assert stats["entropy"] == stats["jacobian"] == stats["jacobian_fd"] == stats["first_mass"] == 0.0
    assert stats["max_prob"] == stats["separability"] == 1.0
    assert stats["distance"] == n - 1  # every outsider has weight 0 and lies at |s| = 1


@pytest.mark.parametrize("gap", [30.0, 60.0, 300.0])
@pytest.mark.parametrize("n", [2, 80])
def test_nearly_one_hot_row_keeps_relative_accuracy(n, gap):
    rest = (n - 1) * math.exp(-gap)
    z = np.full(n, -gap)
    z[0] = 0.0
    stats = row_stats(z, fd_epsilon=1e-3)
    assert stats["entropy"] == pytest.approx(rest * (1 + gap), rel=1e-9)
    # p = (1 - r, r/m, ..., r/m) to first order in r: J is r times the rank-one matrix of (1, -1/m, ...) plus diag r/m
    assert stats["jacobian"] == pytest.approx(rest * (1 + 1 / (n - 1)), rel=1e-9)
    v = direction_table("cpu").double().numpy()[:n]
    v = 1e-3 * v / np.linalg.norm(v)
    moved = math.exp(-gap) * np.expm1(v[1:] - v[0])
    assert stats["jacobian_fd"] == pytest.approx(np.linalg.norm([moved.sum(), *moved]) / 1e-3, rel=1e-9)


@pytest.mark.parametrize("n", [2, 64, 65, 1024])
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_two_tied_logits_reach_the_spectral_bound(n, tau):
    z = np.full(n, -1000.0)
    z[:2] = 3.0
    assert row_stats(z, tau=tau)["jacobian"] == pytest.approx(1 / (2 * tau), rel=1e-13)


def test_two_keys_by_hand():
    p = 1 / (1 + math.exp(-1.5))
    stats = row_stats(np.array([2.0, 0.5]), np.array([[1.0, 0.0], [0.0, 1.0]]), tau=0.5, top_n=1)
    assert stats["entropy"] == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    assert stats["jacobian"] == pytest.approx(2 * p * (1 - p) / 0.5)
    assert stats["logit_std"] == pytest.approx(0.75)
    assert stats["distance"] == pytest.approx(math.hypot(p, 1 - p))


def test_sink_is_an_outcome_but_no_key():
    z = np.array([1.0, 0.0, -1.0])
    p = np.exp(z) / (np.exp(z).sum() + math.exp(2.0))
    q = np.append(p, 1 - p.sum())
    stats = row_stats(z, sink=2.0, top_n=2, tau=2.0)
    assert stats["sink_mass"] == pytest.approx(q[3])
    assert stats["entropy"] == pytest.approx(-(q * np.log(q)).sum())
    assert stats["entropy_norm"] == pytest.approx(stats["entropy"] / math.log(4))
    assert stats["max_prob"] == pytest.approx(p[0])  # not the sink's, though that is larger
    assert stats["max_logit"] == 1.0
    assert stats["top_mass"] == pytest.approx(p[:2].sum())
    assert stats["jacobian"] == pytest.approx(np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))[-1] / 2)
    without, absent = row_stats(z), row_stats(z, sink=-math.inf)
    assert {k: absent[k] for k in absent if k != "entropy_norm"} == pytest.approx(
        {k: without[k] for k in without if k != "entropy_norm"}
    )


def test_ties_select_the_lowest_index_and_the_ball_is_open():
    tokens = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    stats = row_stats(np.zeros(4), tokens, top_n=2)
    # s = (x_0 + x_1) / 4: all four keys lie at 1/4, so none is strictly nearer than the nearest outsider
    assert stats["separability"] == 0.0
    assert stats["distance"] == pytest.approx(0.5)
    assert row_stats(np.zeros(4), tokens, top_n=1)["separability"] == 1.0
    assert row_stats(np.zeros(4), np.ones((4, 2)), top_n=1)["separability"] == 1.0  # identical tokens, at distance 0


def test_rows_no_longer_than_n():
    stats = row_stats(np.array([1.0, 0.0]), np.eye(2), top_n=2)
    assert "separability" not in stats
    assert stats["distance"] == 0.0
    assert stats["top_mass"] == pytest.approx(1.0)


# ---- independent formulas


def _independent_row(z, sink, x, top_n, tau, epsilon, v):
    """The metrics of a row by plain torch formulas and autograd."""
    z = torch.from_numpy(z)
    tail = torch.empty(0, dtype=torch.float64) if sink is None else torch.tensor([sink], dtype=torch.float64)

    def weights(logits):
        return torch.cat([logits, tail]).softmax(0)

    q = weights(z).detach()
    p = q[: len(z)]
    jacobian = torch.autograd.functional.jacobian(lambda y: weights(y / tau)[: len(z)], z * tau)
    v = torch.from_numpy(v / np.linalg.norm(v))
    step = weights((z * tau + epsilon * v) / tau)[: len(z)] - p
    inside = p.sort(descending=True, stable=True).indices[:top_n]
    mask = torch.ones(len(z), dtype=torch.bool).index_fill(0, inside, False)
    gaps = (p[:, None] * torch.from_numpy(x) - (p[inside, None] * torch.from_numpy(x)[inside]).sum(0)).norm(dim=1)
    return {
        "entropy": float(torch.special.entr(q).sum()),
        "logit_std": float(z.std(correction=0)),
        "top_mass": float(p[inside].sum()),
        "jacobian": float(torch.linalg.matrix_norm(jacobian, 2)),
        "jacobian_fd": float(step.detach().norm()) / epsilon,
        "separability": float((gaps[inside] < gaps[mask].min()).double().mean()),
        "distance": float(gaps[mask].sum()),
    }


@pytest.mark.parametrize("seed", range(40))
def test_row_against_autograd(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 90))
    z = rng.normal(size=n) * rng.uniform(0.1, 4)
    x = rng.normal(size=(n, 6))
    sink = float(rng.normal()) if seed % 3 == 0 else None
    tau, epsilon = float(rng.uniform(0.3, 3)), (0.01, 0.1, 10.0)[seed % 3]
    start = direction_start(7)
    v = direction_table("cpu").double().numpy()[(start + np.arange(n)) % TABLE_SIZE]
    expected = _independent_row(z, sink, x, 4, tau, epsilon, v)
    stats = row_stats(z, x, tau=tau, sink=sink, query_position=7, top_n=4, fd_epsilon=epsilon)
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-8)


def test_finite_difference_survives_steps_that_overflow():
    z = np.random.default_rng(0).normal(size=30)
    fd = row_stats(z, tau=1e-3, fd_epsilon=10.0)["jacobian_fd"]
    assert 0.0 < fd <= math.sqrt(2) / 10


def test_secular_equation_agrees_with_the_eigensolver():
    rng = np.random.default_rng(1)
    for trial in range(600):
        z = rng.normal(size=int(rng.integers(2, 65))) * 10.0 ** rng.uniform(-3, 2)
        z[rng.integers(z.size)] = z.max() - (0.0 if trial % 3 else 1e-9 * trial)
        sink = [z.max() + rng.uniform(-3, 30)] if trial % 4 == 0 else []
        p, rest, _ = softmax_row(np.append(z, sink))
        p, rest = p[: z.size], rest[: z.size]
        assert secular_eigenvalue(p, rest) == pytest.approx(largest_eigenvalue(p, rest), rel=1e-12, abs=1e-300)


# ---- whole calls against PyTorch's attention


def _weights_by_sdpa(call):
    """[B, H, Lq, Lk] weights: what SDPA answers when the values are the identity; float64."""
    q, k = call["query"].double(), call["key"].double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    identity = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    mask = call.get("attn_mask")
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    if call.get("is_causal") and mask is not None:  # SDPA takes one or the other
        triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = mask & triangle if mask.dtype == torch.bool else mask.masked_fill(~triangle, -torch.inf)
    causal = bool(call.get("is_causal")) and mask is None
    return scaled_dot_product_attention(q, k, identity, mask, is_causal=causal, scale=call.get("scale"))


@pytest.mark.parametrize("mask", ["none", "bool", "bool_2d", "bool_batch", "bool_head", "float", "float_inf"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_mask_sees_what_sdpa_sees(mask, is_causal):
    plain = {"padding": "none", "window_kind": "none", "packed": False, "softcap": None, "with_sinks": False}
    # a cross call: no query is taken for padding
    call = draw_call(3, mask=mask, is_causal=is_causal, q_len=9, k_len=11, heads=4, kv_heads=2, **plain)
    weights = _weights_by_sdpa(call)
    visible_rows = weights.isfinite().all(-1) & (weights.sum(-1) > 0.5)  # SDPA answers NaN or 0 where nothing is seen
    stats = attention_stats(**call)
    counts = attention_rows(**call)
    assert counts["rows"].tolist() == visible_rows.sum((0, 2)).tolist()
    assert counts["masked"].tolist() == (~visible_rows).sum((0, 2)).tolist()
    for head in range(4):
        rows = weights[:, head][visible_rows[:, head]]
        expected = {
            "entropy": torch.special.entr(rows).sum(-1).mean(),
            "max_prob": rows.max(-1).values.mean(),
            "top_mass": rows.topk(min(call["top_n"], 11)).values.sum(-1).mean(),
        }
        for name, number in expected.items():
            assert float(stats[name][head]) == pytest.approx(float(number), rel=1e-5), (name, call_id(call))


@pytest.mark.slow
def test_window_padding_and_documents_equal_their_masks():
    for seed in range(40):
        call = draw_call(seed, mask="none", q_len=12, k_len=12)
        i, j = torch.arange(12)[:, None], torch.arange(12)[None, :]
        visible = torch.ones(call["query"].shape[0], 1, 12, 12, dtype=torch.bool)
        window, padding, bounds = (call.pop(name, None) for name in ("window", "key_padding_mask", "cu_seqlens"))
        if isinstance(window, int):
            visible = visible & (i - j < window) & (j - i < window)
        elif window is not None:
            left, right = (99 if side in (None, -1) else side for side in window)
            visible = visible & (j >= i - left) & (j <= i + right)
        if padding is not None:
            visible = visible & ~(padding if padding.dtype == torch.bool else padding < 0)[:, None, None, :]
        if bounds is not None:
            document = torch.bucketize(torch.arange(12), bounds[1:-1], right=True)
            visible = visible & (document[:, None] == document[None, :])
        options = {"window": window, "key_padding_mask": padding, "cu_seqlens": bounds}
        metrics = [name for name in attention_stats(**call) if not (bounds is not None and name in POSITIONAL)]
        by_option = attention_stats(**call, **options, metrics=metrics)
        by_mask = attention_stats(**call, attn_mask=visible, metrics=metrics)
        assert_stats_close(by_option, by_mask, 1e-6, context=f"{call_id(call)} {options}")


POSITIONAL = ("first_mass", "jacobian_fd")  # depend on where a document begins, which a mask alone does not tell


def test_packed_documents_equal_a_padded_batch():
    call = draw_call(5, packed=True, mask="none", q_len=17, heads=2, kv_heads=1, is_causal=True, window_kind="none")
    call["cu_seqlens"] = torch.tensor([0, 5, 6, 17])
    pieces = list(zip([0, 5, 6], [5, 6, 17], strict=True))
    unpacked = dict(call, key_padding_mask=torch.tensor([[t >= e - s for t in range(11)] for s, e in pieces]))
    unpacked.pop("cu_seqlens")
    for name in ("query", "key", "value"):
        padded = torch.zeros(3, call[name].shape[1], 11, call[name].shape[3], dtype=call[name].dtype)
        for row, (start, end) in enumerate(pieces):
            padded[row, :, : end - start] = call[name][0, :, start:end]
        unpacked[name] = padded
    assert_stats_close(attention_stats(**call), attention_stats(**unpacked), 1e-6)
    assert attention_rows(**call)["rows"].tolist() == attention_rows(**unpacked)["rows"].tolist() == [17, 17]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", range(6))
def test_padding_moves_nothing(side, seed):
    """Padding tokens full of NaN, on either side, change no metric and are counted."""
    call = draw_call(
        seed, padding="none", packed=False, mask="none", q_len=14, k_len=14, dtype=torch.float32, top_n=(1, 4)[seed % 2]
    )
    padded = dict(call)
    extra = (0, 0, 5, 0) if side == "left" else (0, 0, 0, 5)
    for name in ("query", "key", "value"):
        padded[name] = torch.nn.functional.pad(call[name], extra, value=math.nan)
    batch = call["query"].shape[0]
    mask = torch.nn.functional.pad(torch.zeros(batch, 14, dtype=torch.bool), extra[2:], value=True)
    padded["key_padding_mask"] = mask
    assert_stats_close(attention_stats(**padded), attention_stats(**call), 1e-6, context=call_id(call))
    assert (attention_rows(**padded)["padding"] == 5 * batch).all()


def test_garbage_in_masked_keys_does_not_leak():
    call = draw_call(11, padding="none", packed=False, mask="bool_key", q_len=6, k_len=10, dtype=torch.float32)
    hidden = ~call["attn_mask"][:, :, 0, :, None]  # [B, 1, Lk, 1]
    for garbage in (math.nan, math.inf, -math.inf):
        dirty = dict(
            call, key=call["key"].masked_fill(hidden, garbage), value=call["value"].masked_fill(hidden, garbage)
        )
        assert_stats_close(attention_stats(**dirty), attention_stats(**call), 1e-6)
        assert attention_rows(**dirty)["nonfinite"].sum() == 0


def test_counts_by_reason():
    query, key = torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, :, 3] = False  # token 3 of sequence 0 is padding
    mask[0, 0, 1] = False  # query 1 of sequence 0 sees nothing
    query[1, 0, 2, 0] = math.nan
    query[1, 0, 3, 0] = math.inf
    counts = {name: int(count) for name, count in attention_rows(query, key, attn_mask=mask).items()}
    assert counts == {"rows": 4, "padding": 1, "masked": 1, "nonfinite": 2}
    cross = {name: int(count) for name, count in attention_rows(query, key, attn_mask=mask, is_cross=True).items()}
    assert cross == {"rows": 5, "padding": 0, "masked": 1, "nonfinite": 2}


def test_head_without_rows_is_nan():
    stats = attention_stats(
        torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), attn_mask=torch.zeros(3, 3, dtype=torch.bool)
    )
    assert all(head.isnan().all() and head.shape == (2,) and head.dtype == torch.float32 for head in stats.values())


def test_low_mask_values_hide_and_large_biases_do_not():
    for level, hides in ((-1e9, True), (-1e8, True), (-1e4, False), (torch.finfo(torch.float32).min, True)):
        mask = torch.tensor([[0.0, 0.0, level]])
        std = attention_stats(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4), attn_mask=mask)["logit_std"]
        assert (float(std) == 0.0) == hides
    half = torch.tensor([[0.0, 0.0, torch.finfo(torch.float16).min]], dtype=torch.float16)
    counts = attention_stats(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 3, 4), attn_mask=half)
    assert float(counts["logit_std"]) == 0.0


def test_softcap_and_uncapped_logits():
    call = draw_call(2, softcap=2.0, mask="float", q_len=7, k_len=9, padding="none", window_kind="none", packed=False)
    q, k = call["query"].double(), call["key"].double()
    raw = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * call.get("scale", q.shape[3] ** -0.5)
    bias = call["attn_mask"].double()
    visible = torch.ones(7, 9, dtype=torch.bool)
    visible = visible.tril() if call.get("is_causal") else visible
    stats = attention_stats(**call)
    for name, z in (("max_logit", 2.0 * torch.tanh(raw / 2.0) + bias), ("max_logit_uncapped", raw + bias)):
        expected = z.masked_fill(~visible, -math.inf).amax((0, 2, 3)).float()
        torch.testing.assert_close(stats[name], expected)


def test_given_logits_equal_recomputed_ones():
    call = draw_call(
        8, mask="float_inf", softcap=None, padding="none", window_kind="none", packed=False, is_causal=False
    )
    q, k = call.pop("query").double(), call.pop("key").double()
    mask = call.pop("attn_mask")
    scale = call.get("scale", q.shape[3] ** -0.5)
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale + mask.double()
    given = attention_stats(None, None, **call, logits=logits, head_dim=q.shape[3])
    assert_stats_close(given, attention_stats(q, k, **call, attn_mask=mask), 1e-6)


def test_causal_offset_aligns_triangle_and_window():
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 8, 4)
    mask = torch.tensor([[i + 5 - 4 < j <= i + 5 for j in range(8)] for i in range(3)])
    aligned = attention_stats(q, k, is_causal=True, causal_offset=5, window=4, metrics=["entropy", "max_logit"])
    assert_stats_close(aligned, attention_stats(q, k, attn_mask=mask, metrics=["entropy", "max_logit"]), 1e-6)


def test_token_choices():
    call = draw_call(4, q_len=9, k_len=9, top_n=2, mask="none", padding="none", packed=False, dtype=torch.float32)
    unit = attention_stats(**call)
    call["value"] = call["value"] * torch.rand(1, 1, 9, 1).add(0.5)
    assert_stats_close(attention_stats(**call), unit, 1e-5)
    raw = attention_stats(**call, tokens="value_raw")
    doubled = attention_stats(**dict(call, value=2 * call["value"]), tokens="value_raw")
    torch.testing.assert_close(doubled["distance"], 2 * raw["distance"])
    torch.testing.assert_close(doubled["separability"], raw["separability"])
    hidden = torch.randn(call["query"].shape[0], 9, 30)
    repeated = torch.nn.functional.normalize(hidden, dim=-1)[:, None].expand(-1, call["key"].shape[1], -1, -1)
    by_hidden = attention_stats(**call, tokens="hidden", hidden=hidden)
    assert_stats_close(by_hidden, attention_stats(**dict(call, value=repeated), tokens="value_raw"), 1e-5)


def test_metrics_follow_what_the_call_has():
    q = torch.randn(1, 2, 4, 8)
    assert not {"sink_mass", "max_logit_uncapped", "separability", "distance"} & set(attention_stats(q, q))
    asked = attention_stats(q, q, metrics=["sink_mass", "max_logit_uncapped", "max_logit"])
    assert asked["sink_mass"].tolist() == [0.0, 0.0]
    assert torch.equal(asked["max_logit_uncapped"], asked["max_logit"])
    with pytest.raises(AttnmonError, match="value="):
        attention_stats(q, q, metrics=["separability"])
    with pytest.raises(AttnmonError, match="hidden="):
        attention_stats(q, q, q, tokens="hidden", metrics="distance")
    with pytest.raises(AttnmonError, match="unknown metric"):
        attention_stats(q, q, metrics=["entropi"])


@pytest.mark.parametrize(
    "options",
    [
        {"top_n": 0},
        {"fd_epsilon": 0.0},
        {"tokens": "keys"},
        {"scale": 0.0},
        {"window": 0},
        {"cu_seqlens": torch.tensor([0])},
    ],
)
def test_impossible_options_are_refused(options):
    q = torch.randn(2, 2, 4, 8)
    with pytest.raises(AttnmonError):
        attention_stats(q, q, q, **options)


def test_effective_temperature():
    q = torch.randn(1, 2, 6, 8)
    stats = attention_stats(q, q)
    torch.testing.assert_close(stats["effective_temperature"], 1 / stats["logit_std"])
    assert attention_stats(q * 0, q)["effective_temperature"].isinf().all()


# ---- directions


def test_direction_table():
    table = direction_table("cpu")
    assert table.shape == (TABLE_SIZE,)
    assert table.dtype == torch.float32
    assert table is direction_table(torch.device("cpu"))
    moments = [float((table.double() ** power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.03)
    assert abs(float((table[1:] * table[:-1]).mean())) < 0.01


def test_direction_start_is_the_same_for_ints_and_tensors():
    positions = [0, 1, 1000, 2**31 - 1, 2**31, -3]
    assert direction_start(torch.tensor(positions)).tolist() == [direction_start(i) for i in positions]
    assert len({direction_start(i) for i in range(5000)}) == 5000


# ---- the shared helpers


@pytest.mark.slow
def test_drawn_calls_are_reproducible_and_measurable():
    for seed in range(60):
        call, again = draw_call(seed), draw_call(seed)
        assert call_id(call) == call_id(again)
        stats, counts = attention_stats(**call), attention_rows(**call)
        assert_stats_close(attention_stats(**again), stats, 0.0)
        total = call["query"].shape[0] * call["query"].shape[2]
        assert (sum(counts.values()) == total).all()
        assert torch.equal(counts["rows"] == 0, stats["entropy"].isnan())


def test_assert_stats_close_names_the_worst_metric_and_head():
    good = {"entropy": torch.ones(3), "max_prob": torch.ones(3)}
    bad = {"entropy": torch.tensor([1.0, 1.001, 1.0]), "max_prob": torch.tensor([1.0, 1.0, 2.0])}
    with pytest.raises(AssertionError, match="max_prob, head 2"):
        assert_stats_close(bad, good, 1e-4)
    with pytest.raises(AssertionError, match="NaN"):
        assert_stats_close(dict(good, entropy=torch.full((3,), math.nan)), good)
    with pytest.raises(AssertionError, match="metrics differ"):
        assert_stats_close({"entropy": torch.ones(3)}, good)
