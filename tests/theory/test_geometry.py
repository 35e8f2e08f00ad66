"""Distances, their bound and their expectation against the definitions written out, and against the live metrics."""

import numpy as np
import pytest
import torch

import attnmon
from attnmon.errors import AttnmonError
from attnmon.stats.reference import row_stats
from attnmon.theory import (
    distance,
    distance_bound,
    expected_distance,
    expected_distance_limit,
    expected_distance_monte_carlo,
    expected_distance_residual,
    head_geometry,
    separability,
    top_n_distance,
)
from tests.theory.cases import (
    SLACK,
    brute_bound,
    brute_distance,
    brute_expectation,
    causal_head,
    make_row,
    rows,
    split,
)

CLOSE = {"rel": 1e-9, "abs": 1e-9}


def sizes(row, rng):
    """Some N below the number of visible keys."""
    n = int(row.visible.sum())
    return sorted({1, int(rng.integers(1, n)), n - 1})


def test_distance_of_any_set_is_the_sum_of_norms():
    rng = np.random.default_rng(0)
    for row in rows():
        weights, tokens, mask = row.tensors()
        places = np.flatnonzero(row.visible)
        chosen = rng.permutation(places.size)[: rng.integers(1, places.size)]
        selected = torch.zeros_like(mask)
        selected[places[chosen]] = True
        if not row.visible.all():
            selected[np.flatnonzero(~row.visible)[0]] = True  # a hidden key in the set does not count
        got = float(distance(weights, tokens, selected, mask))
        assert got == pytest.approx(brute_distance(row.p, row.seen, chosen), **CLOSE)


def test_top_n_distance_and_its_bound_are_those_of_the_definitions_and_of_the_live_metric():
    rng = np.random.default_rng(1)
    for row in rows():
        weights, tokens, mask = row.tensors()
        for num in sizes(row, rng):
            inside, outside = split(row.p, num)
            got = float(top_n_distance(weights, tokens, num, mask))
            assert got == pytest.approx(brute_distance(row.p, row.seen, inside), **CLOSE)
            live = row_stats(row.z[row.visible], row.seen, top_n=num)
            assert got == pytest.approx(live["distance"], **CLOSE)
            bound = float(distance_bound(weights, tokens, num, mask))
            assert bound == pytest.approx(brute_bound(row.p, row.seen, inside, outside), **CLOSE)
            assert got <= bound * SLACK + 1e-9  # Theorem 1(1)


@pytest.mark.slow
def test_the_bounds_hold_where_a_sink_takes_part_of_the_weight():
    for row in rows():
        weights, tokens, mask = row.tensors()
        for share in (0.9, 0.1):
            part = (weights * share, tokens, 2, mask)
            assert float(top_n_distance(*part)) <= float(distance_bound(*part)) * SLACK + 1e-9
            measured = separability(*part)
            assert float(measured.lower_bound) <= float(measured.fraction) + 1e-9
            mean, error = expected_distance_monte_carlo(*part[:3], draws=8, visible=mask)
            assert float(mean - 6 * error) <= float(expected_distance_limit(tokens, 2, mask)) + 1e-9


def test_theorem_1_is_no_bound_for_arbitrary_sets():
    p, x = torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    selected = torch.tensor([False, False, True])
    assert float(distance(p, x, selected)) == pytest.approx(0.7)
    assert brute_bound(p.numpy(), x.numpy(), np.array([2]), np.array([0, 1])) == pytest.approx(-0.7)


def test_top_n_distance_grows_with_length_only_while_the_selected_mass_stays():
    """About (n - N) |s|: linear for a head with a sharp key, bounded for a diffuse one."""
    grown = {}
    for kind in ("sharp", "diffuse"):
        found = []
        for n in (64, 1024):
            weights, tokens, _ = causal_head(seed=n, length=n, width=16, sharpness=0.1)
            p = weights[-1].clone()
            if kind == "sharp":
                p[3] = 1.0
                p /= p.sum()
            found.append(float(top_n_distance(p, tokens, 5)))
        grown[kind] = found[1] / found[0]
    assert grown["sharp"] == pytest.approx(1019 / 59, rel=0.02)
    assert grown["diffuse"] < 1.5


def test_theorem_1_expectation_against_all_subsets():
    rng = np.random.default_rng(2)
    largest = 0.0
    for index in range(160):
        row = make_row(rng, rows()[index].kind, int(rng.integers(3, 9)))
        weights, tokens, mask = row.tensors()
        n = int(mask.sum())
        num = int(rng.integers(1, n))
        expected, main, residual = brute_expectation(row.p, row.seen, num)
        got = float(expected_distance(weights, tokens, num, mask))
        rest = float(expected_distance_residual(weights, tokens, num, mask))
        assert got == pytest.approx(main, **CLOSE)
        assert rest == pytest.approx(residual, rel=1e-7, abs=1e-8)
        assert got - 1e-9 <= expected * SLACK
        assert expected <= (got + rest) * SLACK + 1e-8
        assert expected <= float(expected_distance_limit(tokens, num, mask)) * SLACK + 1e-12
        if main > 1e-3:
            largest = max(largest, (expected - main) / main)
    assert largest > 0.1  # the residual is no detail


def test_residual_of_a_row_with_one_overwhelming_weight_keeps_its_digits():
    rng = np.random.default_rng(3)
    p = np.array([1.0, 1e-9, 2e-9, 3e-9, 1e-9])
    p[0] = 1.0 - p[1:].sum()
    x = rng.normal(size=(5, 3))
    _, _, residual = brute_expectation(p, x, 2)
    got = expected_distance_residual(torch.tensor(p), torch.tensor(x), 2)
    assert float(got) == pytest.approx(residual, rel=1e-9)


def test_expected_distance_does_not_grow_linearly():
    limit, means = [], []
    for n in (64, 256, 1024):
        weights, tokens, _ = causal_head(seed=n, length=n, width=16, sharpness=1.0)
        mean, error = expected_distance_monte_carlo(weights[-1], tokens, 5, draws=100, seed=1)
        means.append(float(mean))
        limit.append(float(expected_distance_limit(tokens, 5)))
        assert float(mean) + 5 * float(error) < limit[-1]
    assert max(limit) <= 6
    assert means[2] < 1.3 * means[0]  # 16 times the keys


def test_monte_carlo_agrees_with_all_subsets_and_tells_its_error():
    rng = np.random.default_rng(4)
    state = torch.random.get_rng_state()
    misses, total = 0, 0
    for kind in ("random", "sharp", "padded", "tied"):
        row = make_row(rng, kind, 8)
        weights, tokens, mask = row.tensors()
        repeated = weights.expand(50, -1), tokens, mask.expand(50, -1)
        num = min(3, int(mask.sum()) - 1)
        mean, error = expected_distance_monte_carlo(*repeated[:2], num, draws=60, seed=7, visible=repeated[2])
        again = expected_distance_monte_carlo(*repeated[:2], num, draws=60, seed=7, visible=repeated[2])
        assert torch.equal(mean, again[0])
        assert torch.equal(error, again[1])
        assert mean.unique().numel() > 10  # rows draw sets of their own
        expected, _, _ = brute_expectation(row.p, row.seen, num)
        overall = float(error.square().sum().sqrt()) / 50
        assert float(mean.mean()) == pytest.approx(expected, abs=4.5 * overall + 1e-12)
        misses += int(((mean - expected).abs() > 2 * error + 1e-12).sum())
        total += 50
    assert torch.equal(state, torch.random.get_rng_state())
    assert 0.005 < misses / total < 0.12  # two standard errors: about one in twenty


def test_rows_without_keys_outside_have_no_distance():
    weights, tokens, mask = causal_head(length=12)
    for num in (4, 11, 12, 30):
        few = torch.arange(12) < num  # rows of num keys or fewer
        for function in (top_n_distance, distance_bound, expected_distance, expected_distance_residual):
            values = function(weights, tokens, num, mask)
            assert (values[few] == 0.0).all()
            assert (values[~few] >= 0.0).all()
            assert values.isfinite().all()
        mean, error = expected_distance_monte_carlo(weights, tokens, num, draws=3, visible=mask)
        assert (mean[few] == 0.0).all()
        assert (error[few] == 0.0).all()
        assert (expected_distance_limit(tokens, num, mask)[few] == 0.0).all()


@pytest.mark.parametrize("mask_kind", ["causal", "window", "none"])
def test_a_head_at_once_equals_row_by_row(mask_kind):
    length, numbers = 300, [20, 1, 5, 100, 2]  # more rows than one block
    weights, tokens, mask = causal_head(seed=5, length=length)
    if mask_kind == "window":
        mask = mask & torch.ones_like(mask).triu(-130)
    weights = weights * mask / (weights * mask).sum(-1, keepdim=True) if mask_kind != "none" else weights
    visible = None if mask_kind == "none" else mask
    for number, found in zip(numbers, head_geometry(weights, tokens, numbers, visible), strict=True):
        assert found.top_n == number
        own = tokens.expand(length, -1, -1)  # the same rows with keys of their own: another path
        picked = torch.tensor([0, 1, 7, 127, 128, 131, 250, 299])
        part = (weights[picked], own[picked], number, None if visible is None else visible[picked])
        for field, function in (
            ("distance", top_n_distance),
            ("bound", distance_bound),
            ("expected", expected_distance),
            ("residual", expected_distance_residual),
        ):
            torch.testing.assert_close(getattr(found, field)[picked], function(*part), rtol=1e-9, atol=1e-9)
            shared = function(weights, tokens, number, visible)
            torch.testing.assert_close(getattr(found, field), shared, rtol=1e-9, atol=1e-9)
        expected = separability(*part)
        for field in type(expected).__dataclass_fields__:
            torch.testing.assert_close(
                getattr(found.separation, field)[picked], getattr(expected, field), rtol=1e-9, atol=1e-9, equal_nan=True
            )
    assert head_geometry(weights, tokens, [3], visible, bound=False)[0].bound is None


def test_a_head_of_a_live_call_has_the_live_metrics():
    """What ``attnmon.attention_stats`` measures on a call is the mean of what the theory says of its rows."""
    generator = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(1, 2, 96, 16, generator=generator) for _ in range(3))
    query = query * 3.0
    mask = torch.ones(96, 96, dtype=torch.bool).tril()
    for num in (1, 5, 20):
        live = attnmon.attention_stats(query, key, value, is_causal=True, top_n=num)
        for head in range(2):
            logits = (query[0, head] @ key[0, head].T / 4.0).masked_fill(~mask, -torch.inf)
            tokens = torch.nn.functional.normalize(value[0, head], dim=-1)
            (found,) = head_geometry(torch.softmax(logits, -1), tokens, [num], mask)
            assert float(found.distance.mean()) == pytest.approx(float(live["distance"][head]), rel=1e-5)
            fraction = float(found.separation.fraction.nanmean())
            assert fraction == pytest.approx(float(live["separability"][head]), abs=1e-6)


def test_float32_rows_keep_their_digits():
    weights, tokens, mask = causal_head(seed=7, length=200, sharpness=12.0)
    exact = head_geometry(weights, tokens, [1, 5, 50], mask)
    for one, other in zip(exact, head_geometry(weights.float(), tokens.float(), [1, 5, 50], mask), strict=True):
        for field in ("distance", "bound", "expected", "residual"):
            got = getattr(other, field)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), getattr(one, field), rtol=2e-5, atol=2e-6)


def test_bad_input_says_what_was_expected():
    p, x = torch.full((2, 4), 0.25), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AttnmonError, match="tokens must be"):
        top_n_distance(p, x[:3], 1)
    with pytest.raises(AttnmonError, match="leading axes"):
        top_n_distance(p, x.expand(3, 4, 3), 1)
    with pytest.raises(AttnmonError, match="top_n must be a whole number of at least 1; got"):
        top_n_distance(p, x, 0)
    with pytest.raises(AttnmonError, match="bool"):
        distance(p, x, torch.ones(4))
    with pytest.raises(AttnmonError, match="float tensors"):
        top_n_distance(p.long(), x, 1)
    broken = x.clone()
    broken[2, 1] = torch.nan
    for bad in ((p, broken), (p * torch.inf, x)):
        with pytest.raises(AttnmonError, match="finite"):
            separability(*bad, 1)
    with pytest.raises(AttnmonError, match="draws must be a whole number of at least 2; got"):
        expected_distance_monte_carlo(p, x, 1, draws=1)
    with pytest.raises(AttnmonError, match="rows, keys"):
        head_geometry(p[0], x, [1])
    with pytest.raises(AttnmonError, match="empty"):
        head_geometry(p, x, [])


def test_rows_that_carry_gradients_are_measured():
    """Long rows are ranked in working memory that autograd must not see."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(3, 1024, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(1024, 4, generator=generator, dtype=torch.float64)
    weights = torch.softmax(logits, -1)
    for function in (top_n_distance, distance_bound, lambda *given: separability(*given).margin):
        with torch.no_grad():
            expected = function(weights, tokens, 5)
        got = function(weights, tokens, 5)
        assert torch.equal(got, expected)
        (slope,) = torch.autograd.grad(got.sum(), logits, retain_graph=True)
        assert slope.isfinite().all()
        assert (slope != 0.0).any()
