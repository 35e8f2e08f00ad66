"""The mathematics the product stands on: every statement it shows holds, every one it refuses has a counterexample.

Rows are random, tied, nearly one-hot, uniform, and what is left of a padded row; the seed is fixed. "The paper" is
arXiv 2508.17821.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from attnmon.stats.reference import largest_eigenvalue, row_stats, softmax_row
from tests.helpers import row_logits, slow_but, split

SLACK = 1 + 1e-9  # float64 rounding
KINDS = ("random", "sharp", "tied", "one_hot", "uniform", "padded")


@cache
def rows():
    """(z, x) of 3,000 rows: n logits and n unit vectors, n from 3 to 120."""
    rng = np.random.default_rng(20250817)
    result = []
    for index in range(3000):
        kind = KINDS[index % len(KINDS)]
        n = int(rng.integers(3, 121))
        z = row_logits(rng, kind, n)
        x = rng.normal(size=(n, int(rng.integers(2, 33))))
        x += rng.normal(size=x.shape[1]) * rng.choice([0.0, 3.0])  # also anisotropic clouds
        if kind == "padded":  # a mask hides some keys: the row is what remains
            visible = rng.random(n) < 0.6
            visible[:3] = True
            z, x = z[visible], x[visible]
        result.append((z, x / np.linalg.norm(x, axis=1, keepdims=True)))
    return result


def weights(z):
    return softmax_row(z)[0]


def jacobian(p):
    return np.diag(p) - np.outer(p, p)


# ---- section 3: geometry


def test_lemma_1():
    for z, _ in rows():
        n, rho = z.size, z.max() - z.min()
        stats, p = row_stats(z), weights(z)
        with np.errstate(over="ignore"):
            assert p.min() * SLACK >= 1 / (1 + (n - 1) * np.exp(rho))
        assert p.max() <= SLACK / (1 + (n - 1) * math.exp(-rho))
        assert math.log(n) - rho <= stats["entropy"] * SLACK + 1e-12
        assert stats["entropy"] <= math.log(n) * SLACK


def _theorem_1(p, x, inside, outside):
    """d~ and the bound of Theorem 1(1) for a selected set."""
    s = (p[inside, None] * x[inside]).sum(0)
    distance = np.linalg.norm(p[outside, None] * x[outside] - s, axis=1).sum()
    a = p[inside].sum()
    d1 = np.linalg.norm(x[outside][:, None] - x[inside][None], axis=2).max()
    radius = np.linalg.norm(x[inside], axis=1).max()
    return distance, (1 - a) * d1 + radius * (a * outside.size - (1 - a))


def test_theorem_1_holds_for_the_largest_weights_only():
    rng = np.random.default_rng(0)
    broken = 0
    for index, (z, x) in enumerate(rows()):
        x = x * rng.uniform(0.2, 3, size=(x.shape[0], 1)) if index % 2 else x  # the statement needs no sphere
        p, num = weights(z), int(rng.integers(1, z.size))
        distance, bound = _theorem_1(p, x, *split(p, num))
        assert distance <= bound * SLACK + 1e-12
        assert distance == pytest.approx(row_stats(z, x, top_n=num)["distance"], rel=1e-12, abs=1e-12)
        order = rng.permutation(z.size)
        distance, bound = _theorem_1(p, x, order[:num], order[num:])
        broken += distance > bound * SLACK + 1e-9
    assert broken > 50  # for arbitrary sets it is no bound


def _expected_distance(p, x, num):
    """E[d~] over all sets of size num (enumerated), the main term of its formula, and the bound on the rest."""
    n, y = p.size, p[:, None] * x
    total = 0.0
    for chosen in combinations(range(n), num):
        outside = np.setdiff1d(np.arange(n), chosen)
        total += np.linalg.norm(y[outside] - y[list(chosen)].sum(0), axis=1).sum()
    expected = total / math.comb(n, num)
    m = n - 1
    main = (n - num) / n * np.linalg.norm((1 + num / m) * y - num / m * y.sum(0), axis=1).sum()
    spread = 0.0
    for i in range(n):
        others = np.delete(y, i, axis=0)
        spread += math.sqrt(num * (m - num) / (m * (m - 1)) * ((others - others.mean(0)) ** 2).sum())
    return expected, main, (n - num) / n * spread


def test_expected_distance_of_random_sets():
    rng = np.random.default_rng(1)
    largest = 0.0
    for _ in range(150):
        n = int(rng.integers(3, 9))
        num = int(rng.integers(1, n))
        p = weights(rng.normal(size=n) * rng.uniform(0.1, 6))
        x = rng.normal(size=(n, 3))
        expected, main, rest = _expected_distance(p, x, num)
        assert main / SLACK - 1e-12 <= expected <= (main + rest) * SLACK + 1e-12
        assert expected <= (n - num) / n * (num + 1) * np.linalg.norm(x, axis=1).max() * SLACK
        largest = max(largest, (expected - main) / main)
    assert largest > 0.1  # the rest is no detail: E is to be estimated, not replaced by the main term


def test_expected_distance_does_not_grow_linearly():
    """The paper's claim; E over random sets stays under (N + 1) max |x| however long the row."""
    rng = np.random.default_rng(2)
    means = []
    for n in (64, 256, 1024):
        p = weights(rng.normal(size=n))
        y = p[:, None] * (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True))(rng.normal(size=(n, 16)))
        draws = []
        for _ in range(50):
            chosen = rng.permutation(n)[:5]
            draws.append(np.linalg.norm(np.delete(y, chosen, axis=0) - y[chosen].sum(0), axis=1).sum())
        means.append(np.mean(draws))
    assert max(means) < 6
    assert means[2] < 1.3 * means[0]  # 16 times the keys


def _theorem_2(z, x, num):
    """N_s/N, its two lower bounds and the paper's upper expression; unit vectors (M = 1)."""
    p = weights(z)
    inside, outside = split(p, num)
    y = p[:, None] * x
    gaps = np.linalg.norm(y - y[inside].sum(0), axis=1)
    r = gaps[outside].min()
    separation = np.linalg.norm(x[:, None] - x[None], axis=2)[np.triu_indices(z.size, 1)].min()
    xi = []
    for i in range(num):
        q = np.delete(p[inside], i)
        xi.append(math.sqrt((q**2).sum() + (1 - separation**2 / 2) * (q.sum() ** 2 - (q**2).sum())))
    xi = np.array(xi)
    share = row_stats(z, x, top_n=num)["separability"]
    first, second = 1 - gaps[inside].sum() / (r * num), 1 - xi.sum() / (r * num)
    return share, first, second, np.exp(-((r - xi) ** 2) / 16).mean()


def test_theorem_2_lower_bound_holds_and_the_upper_expression_is_no_bound():
    rng = np.random.default_rng(3)
    broken = checked = separable = 0
    for z, x in rows():
        num = int(rng.integers(1, min(z.size, 33)))
        with np.errstate(divide="ignore", invalid="ignore"):
            share, first, second, upper = _theorem_2(z, x, num)
        if not np.isfinite([first, second]).all():  # r = 0: an outsider lies on s itself, nothing is claimed
            continue
        checked += 1
        assert share >= first - 1e-9
        assert first >= second - 1e-9 * max(1.0, abs(second))
        assert upper >= 0.939  # exp(-1/16): so it can never give "at most 80 %"
        broken += share > upper
        separable += num >= 16 and share > 0.85
    assert checked > 2900
    assert separable > 20  # nor is "70 to 85 %" a law
    assert broken > 50


def test_separability_ignores_the_scale_of_x_and_needs_the_open_ball():
    for z, x in rows()[::20]:
        num = min(4, z.size - 1)
        share = row_stats(z, x, top_n=num)["separability"]
        assert row_stats(z, 8.0 * x, top_n=num)["separability"] == share
        assert row_stats(z, x, top_n=1)["separability"] == 1.0


def test_masked_keys_kept_with_weight_zero_change_the_geometry():
    rng = np.random.default_rng(4)
    z, x = rng.normal(size=50), rng.normal(size=(50, 8))
    padded_z, padded_x = np.append(z, np.full(150, -1e4)), np.append(x, rng.normal(size=(150, 8)), axis=0)
    assert row_stats(padded_z, padded_x)["distance"] > 2 * row_stats(z, x)["distance"]
    assert row_stats(padded_z)["entropy"] == pytest.approx(row_stats(z)["entropy"])  # while this one hides the mistake


# ---- section 4: sensitivity


def test_jacobian_bounds_in_three_norms():
    over_quarter = 0
    for z, _ in rows():
        p = weights(z)
        j = jacobian(p)
        spectral, frobenius = np.linalg.norm(j, 2), np.linalg.norm(j)
        assert np.abs(j).max() <= SLACK / 4
        assert spectral <= SLACK / 2
        assert frobenius <= SLACK / 2
        assert spectral <= frobenius * SLACK
        s2, s3 = (p**2).sum(), (p**3).sum()
        assert frobenius**2 == pytest.approx(s2 - 2 * s3 + s2**2, rel=1e-6, abs=1e-14)
        assert row_stats(z, tau=0.25)["jacobian"] == pytest.approx(spectral / 0.25, rel=1e-9, abs=1e-14)
        over_quarter += spectral > 0.25
    assert over_quarter > 300  # the paper's 1/(4T) is no bound of the spectral norm


def test_jacobian_bounds_are_sharp_and_the_papers_fails():
    j = jacobian(np.array([0.5, 0.5, 0.0]))
    assert np.abs(j).max() == 0.25
    assert np.linalg.norm(j, 2) == pytest.approx(0.5)
    assert np.linalg.norm(j) == pytest.approx(0.5)
    # min(1/(4T), sqrt 2) at T = 0.1: the spectral norm there is 5
    assert row_stats(np.zeros(2), tau=0.1)["jacobian"] == pytest.approx(5.0)


def test_sandwich_of_the_largest_eigenvalue():
    for z, _ in rows():
        p, rest, _ = softmax_row(z)
        eigenvalue = largest_eigenvalue(p, rest)
        s2 = (p**2).sum()
        assert (p * rest).max() <= eigenvalue * SLACK
        assert np.sort(p)[-2] <= eigenvalue * SLACK
        assert eigenvalue <= SLACK * p.max()
        assert eigenvalue <= SLACK * 2 * (p * rest).max()
        assert eigenvalue <= SLACK * math.sqrt(s2 * (1 - s2)) + 1e-12  # 1 - S2 itself cancels in a one-hot row
        if p.max() < 0.9 and p.max() - np.sort(p)[-2] > 1e-6:
            assert (p**2 / (p - eigenvalue)).sum() == pytest.approx(1.0, rel=1e-6)  # the secular equation


def _eigenvalue_from_power_sums(p, num, powers):
    """The secular root from the num largest weights and sum p^2 ... p^(powers + 1) of the rest."""
    ranked = np.sort(p)[::-1]
    top, rest = ranked[:num], ranked[num:]
    sums = np.array([(rest**k).sum() for k in range(2, powers + 2)])
    low, high = ranked[1], ranked[0]
    for _ in range(60):
        middle = 0.5 * (low + high)
        value = (top**2 / (top - middle)).sum() - (sums / middle ** np.arange(1, powers + 1)).sum() - 1.0
        low, high = (middle, high) if value < 0.0 else (low, middle)
    return low


def test_power_sums_of_the_tail_suffice_for_peaked_rows_only():
    """The series in p / lambda converges slowly where the tail's weights are near the second largest."""
    rng = np.random.default_rng(8)
    errors = {}
    for spread in (3.0, 0.03):
        p, rest, _ = softmax_row(rng.normal(size=65) * spread)
        eigenvalue = largest_eigenvalue(p, rest)
        errors[spread] = abs(_eigenvalue_from_power_sums(p, 16, 8) / eigenvalue - 1)
    assert errors[3.0] < 1e-7
    assert errors[0.03] > 1e-5


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 10.0])
def test_finite_difference_bound(epsilon):
    rng = np.random.default_rng(5)
    over_papers = 0
    for index, (z, _) in enumerate(rows()):
        tau = float(10 ** rng.uniform(-2, 1))
        z = z if index % 2 else z[:3] * 0.1  # short rows: one direction of few keys lies near the worst one
        fd = row_stats(z, tau=tau, query_position=index, fd_epsilon=epsilon)["jacobian_fd"]
        assert 0.0 <= fd <= SLACK * min(1 / (2 * tau), math.sqrt(2) / epsilon)
        over_papers += fd > min(1 / (4 * tau), math.sqrt(2))
    assert over_papers > 100 or epsilon == 10.0


def test_random_direction_sees_the_frobenius_norm_over_the_root_of_n():
    z = np.full(1024, -1000.0)
    z[:2] = 0.0
    steps = [row_stats(z, query_position=i, fd_epsilon=1e-3)["jacobian_fd"] for i in range(2000)]
    assert math.sqrt(np.mean(np.square(steps))) == pytest.approx(0.5 / 32, rel=0.05)
    assert row_stats(z)["jacobian"] == pytest.approx(0.5)


def test_low_temperature_has_two_faces():
    def at(temperature, gap):
        return row_stats(np.array([gap, 0.0]) / temperature, tau=temperature)["jacobian"]

    for gap in (0.1, 1.0, 7.0):
        temperatures = gap * np.linspace(0.05, 5, 2000)
        norms = [at(t, gap) for t in temperatures]
        assert max(norms) == pytest.approx(0.448 / gap, rel=2e-3)
        assert temperatures[np.argmax(norms)] == pytest.approx(0.648 * gap, rel=5e-3)
    assert at(0.1, 1.0) == pytest.approx(0.0009, abs=5e-5)  # frozen
    assert at(0.1, 0.0) == pytest.approx(5.0)  # a tie: blow-up


def test_other_normalizers():
    """alpha = F / sum F: J = (diag a - a a^T) diag(F'/F), |J|_2 <= max|F'/F| / 2; here F = softplus."""
    rng = np.random.default_rng(6)
    for _ in range(500):
        z = rng.normal(size=int(rng.integers(2, 12))) * rng.uniform(0.1, 5)

        def alpha(logits):
            f = np.logaddexp(0.0, logits)
            return f / f.sum()

        ratio = 1 / (1 + np.exp(-z)) / np.logaddexp(0.0, z)
        j = jacobian(alpha(z)) * ratio
        h = 1e-6
        numeric = np.stack([(alpha(z + h * e) - alpha(z - h * e)) / (2 * h) for e in np.eye(z.size)], axis=1)
        np.testing.assert_allclose(j, numeric, atol=1e-8)
        assert np.linalg.norm(j, 2) <= SLACK * np.abs(ratio).max() / 2


def _entmax(z, alpha):
    """alpha-entmax by bisection on its threshold: p = [(alpha - 1) z - t]_+ ** (1 / (alpha - 1))."""
    scaled = (alpha - 1) * z
    low, high = scaled.max() - 1.0, scaled.max()
    for _ in range(100):
        t = 0.5 * (low + high)
        total = (np.maximum(scaled - t, 0.0) ** (1 / (alpha - 1))).sum()
        low, high = (t, high) if total > 1.0 else (low, t)
    return np.maximum(scaled - low, 0.0) ** (1 / (alpha - 1))


@pytest.mark.parametrize("alpha", slow_but((1.5,), (1.5, 2.0)))
def test_entmax_and_sparsemax(alpha):
    rng = np.random.default_rng(7)
    checked = 0
    for _ in range(200):
        tau = float(rng.uniform(0.3, 2))
        logits = rng.normal(size=6) * 1.5
        p = _entmax(logits / tau, alpha)
        support = p > 0
        s = np.where(support, np.where(support, p, 1.0) ** (2 - alpha), 0.0)
        j = (np.diag(s) - np.outer(s, s) / s.sum()) / tau
        checked += _matches_finite_difference(lambda y, t=tau: _entmax(y / t, alpha), logits, j)
        if alpha == 2.0:
            assert np.linalg.norm(j, 2) == pytest.approx(1 / tau if support.sum() >= 2 else 0.0, abs=1e-9)
    assert checked > 100


def _matches_finite_difference(function, at, expected, h=1e-5):
    """True if the derivative is as expected, False if a step changes the support, where there is none."""
    support, columns = function(at) > 0, []
    for e in np.eye(at.size):
        if any(not np.array_equal(function(at + sign * 30 * h * e) > 0, support) for sign in (-1, 1)):
            return False
        columns.append((function(at + h * e) - function(at - h * e)) / (2 * h))
    np.testing.assert_allclose(np.stack(columns, axis=1), expected, atol=1e-5)
    return True
