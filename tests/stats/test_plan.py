"""Which rows are chosen: valid ones, distinct, spread out, moving, without random state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmon.call import make_call
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.measure import measure
from attnmon.types import AttentionCall
from tests.stats.oracle import counts_of, packed


def _call(batch=2, q_len=64, k_len=None, heads=2, **options):
    query = torch.randn(batch, heads, q_len, 4)
    key = torch.randn(batch, heads, k_len or q_len, 4)
    return make_call(query, key, key, **options)


def _settings(**options):
    return Settings.create(**{"rows": 8, "sequences": None, "metrics": ["entropy"], **options})


def _live(plan):
    """Positions of each sequence's live rows."""
    live = torch.ones_like(plan.positions, dtype=torch.bool) if plan.live is None else plan.live
    return [row[alive].tolist() for row, alive in zip(plan.positions, live, strict=True)]


PADDING = torch.arange(64)[None] < torch.tensor([[0], [20]])
CALLS = {
    "plain": (_call(), lambda b: range(64)),
    "causal": (_call(is_causal=True), lambda b: range(64)),
    "padded": (_call(key_padding_mask=PADDING), lambda b: range(20 * b, 64)),
    "padded right": (_call(key_padding_mask=PADDING.flip(1)), lambda b: range(64 - 20 * b)),
    "padded float": (
        _call(key_padding_mask=torch.zeros(2, 64).masked_fill(PADDING, -torch.inf), is_causal=True),
        lambda b: range(20 * b, 64),
    ),
    "key mask": (_call(attn_mask=~PADDING[:, None, None]), lambda b: range(20 * b, 64)),
    "dense mask": (
        _call(attn_mask=(~PADDING[:, None, None] & torch.ones(64, 64, dtype=torch.bool).tril())),
        lambda b: range(20 * b, 64),
    ),
    "cross": (_call(q_len=50, k_len=64, key_padding_mask=PADDING), lambda b: range(50)),
    "beyond the keys": (_call(q_len=50, k_len=10, window=5), lambda b: range(14)),
    "documents": (_call(1, cu_seqlens=torch.tensor([3, 10, 40, 60])), lambda b: range(3, 60)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rows", [1, 3, 8, 32])
def test_rows_are_distinct_valid_and_one_of_each_stratum(name, rows):
    call, valid = CALLS[name]
    for draw in range(12):
        for b, positions in enumerate(_live(make_plan(call, _settings(rows=rows), draw))):
            usable = list(valid(b))
            assert positions == sorted(set(positions))
            assert set(positions) <= set(usable)
            assert len(positions) == min(rows, len(usable))
            if len(usable) > rows:
                ranks = [usable.index(position) for position in positions]
                width = len(usable) / rows
                assert all(k * width - 1 <= rank <= (k + 1) * width for k, rank in enumerate(ranks))


@pytest.mark.parametrize("name", CALLS)
def test_more_rows_than_there_are(name):
    """Each valid row exactly once, by strata as by ``rows=None``."""
    call, valid = CALLS[name]
    for rows in (64, 1000, None):
        for b, positions in enumerate(_live(make_plan(call, _settings(rows=rows), 3))):
            assert positions == list(valid(b))


def test_draws_differ_and_repeat():
    call = _call(q_len=500)
    draws = [make_plan(call, _settings(), draw).positions for draw in range(20)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 20
    assert all(torch.equal(make_plan(call, _settings(), i).positions, draw) for i, draw in enumerate(draws))
    assert not torch.equal(draws[0][0], draws[0][1])  # sequences differ too
    torch.manual_seed(1)
    state = torch.get_rng_state()
    make_plan(call, _settings(), 5)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_position_is_drawn_equally_often():
    call = _call(batch=1, q_len=160, is_causal=True)
    counts = torch.zeros(160)
    for draw in range(200):
        counts[make_plan(call, _settings(), draw).positions.flatten()] += 1
    # 8 of 160 rows, 200 times: 10 each; a low-discrepancy sequence stays within a few
    assert counts.min() >= 7
    assert counts.max() <= 13


@pytest.mark.parametrize(("batch", "wanted"), [(1, 4), (2, 4), (4, 4), (5, 4), (9, 4), (64, 4), (7, None), (10, 1)])
def test_sequences(batch, wanted):
    call = _call(batch=batch, q_len=6)
    seen = torch.zeros(batch)
    for draw in range(300):
        plan = make_plan(call, _settings(sequences=wanted), draw)
        chosen = torch.arange(batch)[plan.sequences]
        assert len(chosen) == min(batch, wanted or batch) == len(plan.positions)
        seen[chosen] += 1
    assert seen.min() > 0


def test_documents_get_rows_by_the_number_of_sequences():
    call = _call(1, 64, cu_seqlens=torch.tensor([0, 10, 20, 64]))
    assert make_plan(call, _settings(rows=4, sequences=2)).positions.shape == (1, 8)
    assert make_plan(call, _settings(rows=4, sequences=9)).positions.shape == (1, 12)
    plan = make_plan(call, _settings(rows=None))
    assert plan.first_key[0].tolist() == [0] * 10 + [10] * 10 + [20] * 44


def test_rows_too_short_for_every_metric_are_not_drawn():
    call = _call(1, 64, is_causal=True)
    cases = ((["entropy"], 0), (["entropy_norm"], 1), (["separability"], 16), (["separability", "entropy"], 0))
    for metrics, first in cases:
        plan = make_plan(call, _settings(rows=None, metrics=metrics))
        assert _live(plan)[0] == list(range(first, 64))


def test_a_mask_that_differs_by_head_leaves_rows_to_the_reducer():
    mask = torch.ones(1, 2, 12, 12, dtype=torch.bool)
    mask[0, 1, 3] = mask[0, 0, 4] = False
    packing, matrix = packed(_call(1, 12, attn_mask=mask), {"metrics": ["entropy"]})
    assert counts_of(packing, matrix) == {"rows": [11, 11], "padding": [0, 0], "masked": [1, 1], "nonfinite": [0, 0]}


def test_exclusions_count_all_positions_of_the_sampled_sequences():
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    mask[:, :, :, 60:] = False  # four tokens of padding
    mask[1, :, 5:8] = False  # three queries that see nothing
    for rows in (4, 1000, None):
        packing, matrix = packed(_call(attn_mask=mask), {"metrics": ["entropy"], "rows": rows})
        counts = counts_of(packing, matrix)
        assert (counts["padding"], counts["masked"]) == ([8, 8], [3, 3])
        assert counts["rows"] == ([8, 8] if rows == 4 else [117, 117])


def test_logits_already_gathered():
    """The eager route copies sampled rows and lets the rest go."""
    z = torch.randn(5, 2, 30, 30).masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf)
    value = torch.randn(5, 1, 30, 4)
    call = AttentionCall(None, None, value, 0.5, 4, logits=z)
    settings = Settings.create(rows=7, sequences=2, top_n=3, metrics=["entropy", "separability", "jacobian_fd"])
    plan = make_plan(call, settings, 2)
    whole = measure(call, settings, plan, Packing(settings.metrics))
    rows = z[plan.sequences].gather(2, plan.positions[:, None, :, None].expand(-1, 2, -1, 30))
    taken = replace(plan, gathered=True, shared={})
    gathered = measure(replace(call, logits=rows), settings, taken, Packing(settings.metrics))
    assert torch.equal(whole, gathered)
