"""The secular equation in float32 against float64 eigenvalues of the matrix itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.reference import largest_eigenvalue, secular_eigenvalue, softmax_row
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.measure import measure
from attnmon.types import AttentionCall


def _by_streaming(z, sink=None, top_n=16, dtype=torch.float32):
    """Eigenvalue of each row of z [R, n] through the rows' own code: one head a row."""
    logits = torch.from_numpy(z).float()[None, :, None]  # [1, R, 1, n]
    sinks = None if sink is None else torch.full((len(z),), float(sink))
    call = AttentionCall(None, None, None, 1.0, 1, logits=logits, sinks=sinks, is_cross=True)
    settings = Settings.create(metrics=["jacobian"], rows=None, sequences=None, top_n=top_n)
    packing = Packing(settings.metrics)
    matrix = measure(call, settings, make_plan(call, settings), packing, dtype).numpy()
    return packing.values(matrix)["jacobian"]


def _true(row, sink=None):
    row = row.astype(np.float32).astype(np.float64)
    p, rest, _ = softmax_row(row if sink is None else np.append(row, sink))
    p, rest = p[: row.size], rest[: row.size]
    return largest_eigenvalue(p, rest) if row.size <= 300 else secular_eigenvalue(p, rest)


def _check(z, sink=None, rtol=1e-5, **options):
    expected = np.array([_true(row, sink) for row in z])
    for dtype in (torch.float32, torch.float64):
        np.testing.assert_allclose(_by_streaming(z, sink, dtype=dtype, **options), expected, rtol=rtol, atol=1e-13)


LENGTHS = [2, 3, 5, 6, 17, 18, 64]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("top_n", [1, 16])
@pytest.mark.parametrize("sharpness", [1e-4, 0.01, 0.3, 1.0, 3.0, 8.0])
def test_random_rows(n, top_n, sharpness):
    _check(np.random.default_rng(n).normal(size=(40, n)) * sharpness, top_n=top_n)


@pytest.mark.parametrize("n", [*LENGTHS, 1000])
@pytest.mark.parametrize("top_n", [1, 16])
def test_ties_and_near_ties(n, top_n):
    rng = np.random.default_rng(n)
    rows = []
    for gap in (0.0, 1e-6, 1e-4, 1e-2, 0.3):
        for tied in {2, 3, n // 2, n - 1, n}:
            if 2 <= tied <= n:
                row = rng.normal(size=n) - 3.0
                row[rng.permutation(n)[:tied]] = 2.0 - gap
                row[rng.integers(n)] = 2.0
                rows.append(row)
    _check(np.array(rows), top_n=top_n)


@pytest.mark.parametrize("n", LENGTHS)
def test_uniform_rows(n):
    _check(np.zeros((1, n)))
    assert _by_streaming(np.zeros((1, n)))[0] == pytest.approx(1 / n, rel=1e-6)


@pytest.mark.parametrize("n", [2, 5, 40, 500])
@pytest.mark.parametrize("gap", [5.0, 12.0, 20.0, 30.0])
@pytest.mark.parametrize("top_n", [1, 16])
def test_nearly_one_hot_rows(n, gap, top_n):
    rng = np.random.default_rng(n)
    z = rng.uniform(0, 1, size=(20, n)) - gap
    z[np.arange(20), rng.integers(n, size=20)] = 0.0
    _check(z, top_n=top_n)


@pytest.mark.parametrize("n", [2, 17, 60])
@pytest.mark.parametrize("sink", [-50.0, -3.0, 0.0, 2.0, 10.0, 40.0])
@pytest.mark.parametrize("top_n", [1, 16])
def test_sinks(n, sink, top_n):
    rng = np.random.default_rng(n)
    z = rng.normal(size=(30, n)) * rng.choice([0.1, 1.0, 4.0], size=(30, 1))
    z[::3, : n // 2 + 1] = z[::3].max(1, keepdims=True)
    _check(z, sink, top_n=top_n)


def test_a_tail_of_equal_weights_right_below_the_selected():
    """The five largest end where many equal ones begin: the model of the tail sits on a pole."""
    for n in (30, 300):
        z = np.zeros((3, n))
        z[0, :6] = 1e-3
        z[1, :2] = [2.0, 1e-6]
        z[2, :1] = 6.0
        _check(z, top_n=1)


def test_one_key():
    assert _by_streaming(np.array([[3.0]]))[0] == 0.0
    p = 1 / (1 + math.exp(1.0))
    assert _by_streaming(np.array([[0.0]]), sink=1.0)[0] == pytest.approx(p * (1 - p), rel=1e-6)
