"""Merging chunks, curves over heads, fits and the tests of experiment 3."""

import math

import numpy as np
import pytest
from scipy import stats

from attnmon.paper.claims import claims
from attnmon.paper.summary import critical_points, curve, fit_line, merge_chunks, separation_tests
from attnmon.theory.audit import FALSE


def record(chunk, rows, value, **more):
    return {"layer": 0, "module": "h", "head": 0, "top_n": 5, "chunk": chunk, "rows": rows, "value": value, **more}


KEYS = ("layer", "module", "head", "top_n")


def test_chunks_merge_as_if_all_rows_had_been_averaged_at_once():
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=size) for size in (3, 10, 1)]
    errors = [0.3, 0.1, 0.5]
    records = [
        record(
            chunk,
            len(part),
            float(part.mean()),
            value_max=float(part.max()),
            value_least=float(part.min()),
            value_se=error,
            high_count=int((part > 0).sum()),
        )
        for chunk, (part, error) in enumerate(zip(parts, errors, strict=True))
    ]
    (merged,) = merge_chunks(records, KEYS)
    everything = np.concatenate(parts)
    assert merged["rows"] == 14
    assert merged["value"] == pytest.approx(everything.mean())
    assert merged["value_max"] == everything.max()
    assert merged["value_least"] == everything.min()
    assert merged["high_count"] == (everything > 0).sum()
    assert merged["value_se"] == pytest.approx(math.sqrt((3 * 0.3) ** 2 + (10 * 0.1) ** 2 + 0.5**2) / 14)
    assert "chunk" not in merged


def test_a_chunk_without_rows_adds_nothing():
    (merged,) = merge_chunks([record(0, 0, math.nan), record(1, 4, 2.0)], KEYS)
    assert (merged["rows"], merged["value"]) == (4, 2.0)
    (nothing,) = merge_chunks([record(0, 0, math.nan)], KEYS)
    assert math.isnan(nothing["value"])


def test_a_curve_has_the_heads_of_each_point():
    records = [{"n": n, "y": float(n * head)} for head in range(5) for n in (20, 1, 5)]
    found = curve(records, "n", "y")
    assert found.x.tolist() == [1, 5, 20]
    assert found.mean.tolist() == [2, 10, 40]
    assert found.low.tolist() == [1, 5, 20]
    assert found.high.tolist() == [3, 15, 60]
    assert found.heads[2].tolist() == [0, 20, 40, 60, 80]


def test_heads_without_rows_are_in_no_mean_and_a_point_without_heads_is_no_point():
    nan = math.nan
    records = [{"n": n, "y": y} for n, ys in ((1, (2.0, 4.0)), (5, (nan, 4.0)), (9, (nan, nan))) for y in ys]
    found = curve(records, "n", "y")
    assert found.x.tolist() == [1, 5]
    assert found.mean.tolist() == [3, 4]


def test_the_fitted_line():
    x = np.array([1.0, 2.0, 4.0])
    line = fit_line(x, 3.0 * x + 2.0)
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((3.0, 2.0, 1.0))
    assert line.through_origin == pytest.approx((3 * 21 + 2 * 7) / 21)
    assert fit_line(x[:1], x[:1]) is None


def critical_records(lengths=(32, 64), sizes=(1, 2, 4, 8), heads=40, meet=None, seed=0):
    """Distances above the expectation by a margin that is gone from N = ``meet[length]`` on."""
    rng = np.random.default_rng(seed)
    meet = meet or {32: 4, 64: 8}
    return [
        {
            "length": length,
            "top_n": n,
            "layer": 0,
            "module": "h",
            "head": head,
            "rows": 10,
            "distance": rng.normal() + (5.0 if n < meet[length] else 0.0),
            "expected": rng.normal(),
        }
        for length in lengths
        for n in sizes
        for head in range(heads)
    ]


def test_each_test_is_scipys_and_the_first_that_does_not_separate_is_critical():
    records = critical_records()
    found = separation_tests(records, 0.01)
    assert len(found) == 8
    for test in found:
        here = [r for r in records if (r["length"], r["top_n"]) == (test["length"], test["top_n"])]
        expected = stats.ks_2samp([r["distance"] for r in here], [r["expected"] for r in here])
        assert test["statistic"] == pytest.approx(expected.statistic)
        assert test["p_value"] == pytest.approx(expected.pvalue)
        assert test["separated"] == int(expected.pvalue < 0.01)
        assert test["heads"] == 40
    x, y, none_at = critical_points(found)
    assert (x.tolist(), y.tolist(), none_at) == ([32, 64], [4, 8], [])


def test_a_length_without_a_critical_n_is_named():
    found = separation_tests(critical_records(meet={32: 4, 64: 99}), 0.01)
    x, y, none_at = critical_points(found)
    assert (x.tolist(), y.tolist(), none_at) == ([32], [4], [64])
    (claim,) = claims({}, found)
    assert "none up to L/2 at L = 64" in claim.measured


def test_the_level_decides():
    records = critical_records(heads=12, meet={32: 99, 64: 99})
    for record in records:
        record["distance"] -= 4.0  # one standard deviation apart: no clear case
    counts = [sum(test["separated"] for test in separation_tests(records, level)) for level in (1e-6, 0.01, 0.5)]
    assert counts[0] < counts[1] < counts[2]


def test_heads_with_a_narrow_window_are_left_out_where_they_have_no_rows():
    records = critical_records(lengths=(32,), meet={32: 4})
    for record in records:
        if record["head"] < 30 and record["top_n"] == 8:
            record["distance"] = record["expected"] = math.nan
    assert [test["heads"] for test in separation_tests(records, 0.01)] == [40, 40, 40, 10]


def test_the_share_of_the_length_is_no_law():
    (claim,) = claims({}, separation_tests(critical_records(), 0.01))
    assert claim.verdict == FALSE
    assert claim.measured.startswith("4 at L = 32, 8 at L = 64; fitted slope 0.125")
