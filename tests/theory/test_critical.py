"""Critical N: SciPy's test, asked once for each distinct statistic."""

import sys

import numpy as np
import pytest
import torch

from attnmon.errors import AttnmonError, MissingExtra
from attnmon.theory import critical_n, critical_ns, expected_distance_monte_carlo, ks_test, top_n_distance
from tests.theory.cases import causal_head

stats = pytest.importorskip("scipy.stats")


@pytest.mark.filterwarnings("ignore:ks_2samp. Exact calculation unsuccessful:RuntimeWarning")  # SciPy's own way out
@pytest.mark.parametrize("sizes", [(144, 144), (12, 30), (7, 7), (1, 5)])
def test_statistics_and_p_values_are_scipys(sizes):
    rng = np.random.default_rng(0)
    shift = rng.normal(size=(4, 9, 1)) * 0.5
    first, second = rng.normal(size=(4, 9, sizes[0])) + shift, rng.normal(size=(4, 9, sizes[1]))
    first[0], second[0] = first[0].round(0), second[0].round(0)  # ties
    first[1, 0] = second[1, 0, 0]
    statistic, p_value = ks_test(first, torch.tensor(second))
    assert statistic.shape == p_value.shape == (4, 9)
    for at in np.ndindex(4, 9):
        expected = stats.ks_2samp(first[at], second[at])
        assert statistic[at] == pytest.approx(expected.statistic, abs=1e-14)
        assert p_value[at] == pytest.approx(expected.pvalue, rel=1e-12)


def test_scipy_is_asked_once_for_each_distinct_statistic(monkeypatch):
    calls = []
    original = stats.ks_2samp
    monkeypatch.setattr(stats, "ks_2samp", lambda *samples: calls.append(1) or original(*samples))
    rng = np.random.default_rng(1)
    statistic, _ = ks_test(rng.normal(size=(2000, 20)), rng.normal(size=(2000, 20)))
    assert len(calls) == np.unique(statistic).size <= 20


def series(shifts, seed=2, heads=144):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(len(shifts), heads)) + np.array(shifts)[:, None], rng.normal(size=(len(shifts), heads))


def test_critical_n_is_the_first_that_is_no_longer_told_apart():
    numbers = [1, 5, 10, 20, 100]
    distances, expected = series([5, 3, 0, 3, 0])
    assert critical_n(numbers, distances, expected) == 10
    assert critical_n(numbers, *series([5, 5, 5, 5, 5])) is None
    both = critical_ns(numbers, np.stack([distances, distances + 9.0]), np.stack([expected, expected]))
    assert both[0] == 10
    assert np.isnan(both[1])


def test_the_level_decides():
    """The paper's text (0.01) and its algorithm (0.05) can give different critical N."""
    distances, expected = series([5, 0, 0], seed=3, heads=50)
    p_value = 0.0
    for shift in np.linspace(0.2, 0.6, 400):
        moved = distances.copy()
        moved[1] += shift
        p_value = ks_test(moved, expected)[1][1]
        if 0.01 < p_value < 0.05:
            break
    assert 0.01 < p_value < 0.05
    assert critical_n([1, 2, 3], moved, expected, level=0.01) == 2
    assert critical_n([1, 2, 3], moved, expected, level=0.05) == 3


def test_critical_n_is_no_fixed_share_of_the_length():
    """At the same L = 128, heads of other temperatures have another critical N, or none; 0.06 L would be 8."""
    numbers = [1, 2, 4, 8, 16, 32, 64]
    found = []
    for sharpness in (0.0, 0.2, 0.6, 3.0):
        distances, expected = [], []
        for seed in range(16):
            weights, tokens, mask = causal_head(seed=seed, length=128, width=16, sharpness=sharpness)
            last = slice(96, None)
            parts = [(weights[last], tokens, number) for number in numbers]
            distances.append([float(top_n_distance(*part, mask[last]).mean()) for part in parts])
            draws = [expected_distance_monte_carlo(*part, draws=8, seed=seed, visible=mask[last])[0] for part in parts]
            expected.append([float(values.mean()) for values in draws])
        found.append(critical_n(numbers, np.array(distances).T, np.array(expected).T))
    assert found[0] == 1  # uniform weights: no set differs from another
    assert found[-1] is None
    assert 8 not in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], np.zeros((3, 4)), np.zeros((3, 4))), "one series for each N"),
        (([1, 2], np.zeros(4), np.zeros(4)), "one series for each N"),
        (([2, 1], np.zeros((2, 4)), np.zeros((2, 4))), "ascending"),
        (([1, 2], np.full((2, 4), np.nan), np.zeros((2, 4))), "finite"),
        (([1, 2], np.zeros((2, 0)), np.zeros((2, 4))), "not empty"),
        (([1, 2], np.zeros((2, 4)), np.zeros((2, 4)), 1.5), "level must be a finite number > 0 and < 1; got 1.5"),
    ],
)
def test_bad_series_are_refused(arguments, message):
    with pytest.raises(AttnmonError, match=message):
        critical_n(*arguments)


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.stats", raising=False)
    with pytest.raises(MissingExtra, match=r"attnmon\[paper\]"):
        ks_test(np.zeros(3), np.ones(3))
