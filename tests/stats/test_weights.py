"""Weights that sparsemax and alpha-entmax made: every metric against float64, the Jacobian against autograd's."""

import math

import numpy as np
import pytest
import torch

from attnmon.stats.api import measure
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.weight_rows import largest_sensitivity
from attnmon.types import AttentionCall
from tests.helpers import assert_stats_close, slow_but
from tests.stats.weights_oracle import exact_entmax, weight_stats

entmax = pytest.importorskip("entmax")


def function_of(alpha):
    return lambda z, given: entmax.entmax_bisect(z, alpha=given, dim=-1)


def make(seed, *, batch=2, heads=3, length=12, keys=None, sharpness=1.5, alpha=1.5, hide=-torch.inf, ties=False):
    """A causal call, its weights made by the package in float32."""
    generator = torch.Generator().manual_seed(seed)
    keys = keys or length
    logits = torch.randn(batch, heads, length, keys, generator=generator) * sharpness
    if ties:
        logits = logits.round()
    logits = logits.masked_fill(torch.arange(keys) > torch.arange(length)[:, None], hide)
    alphas = alpha if isinstance(alpha, list) else [alpha] * heads
    weights = torch.stack([exact_entmax(z, a) for z, a in zip(logits.unbind(1), alphas, strict=True)], 1).float()
    value = torch.randn(batch, heads, keys, 5, generator=generator)
    given = torch.tensor(alpha) if isinstance(alpha, list) else alpha
    call = AttentionCall(
        query=None, key=None, value=value, scale=0.5, head_dim=4, logits=logits, weights=weights, alpha=given,
        normalizer=function_of(alpha), is_cross=keys != length,
    )  # fmt: skip
    return call, alphas


def stats_of(call, dtype=torch.float32, **options):
    settings = Settings.create(**{"rows": None, "sequences": None, "top_n": 4, **options})
    packing = Packing(settings.metrics)
    matrix = measure(call, settings, make_plan(call, settings), packing, "torch", dtype=dtype).numpy()
    return {name: torch.from_numpy(value) for name, value in packing.values(matrix).items()}, packing, matrix


# in float32, weights below 1e-7 or so have no exact logarithm's worth of digits left in p^(2 - alpha)
@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.2, 2.6, [1.3, 2.0, 1.7]], ids=str)
@pytest.mark.parametrize("sharpness", slow_but((1.5,), (0.1, 1.5, 8.0)))
def test_equals_float64(alpha, sharpness):
    call, alphas = make(1, alpha=alpha, sharpness=sharpness)
    expected = weight_stats(call.logits, call.weights, call.value, alphas, top_n=4)
    actual, _, _ = stats_of(call)
    assert_stats_close({name: actual[name] for name in expected}, expected, 2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    slow_but([{"top_n": 30}], [{"top_n": 1}, {"top_n": 30}, {"fd_epsilon": 10.0}, {"fd_epsilon": 1e-3}]),
    ids=str,
)
def test_options(options):
    call, alphas = make(2, length=16)
    expected = weight_stats(call.logits, call.weights, call.value, alphas, **{"top_n": 4, **options})
    actual, _, _ = stats_of(call, **options)
    assert_stats_close({name: actual[name] for name in expected}, expected, 2e-5, atol=2e-6)


def test_ties_and_more_selected_keys_than_support():
    """Keys of weight zero are selected by lowest index, hidden keys never."""
    call, alphas = make(3, alpha=2.0, sharpness=3.0, length=24, ties=True)
    expected = weight_stats(call.logits, call.weights, call.value, alphas, top_n=8)
    actual, _, _ = stats_of(call, top_n=8)
    assert_stats_close({name: actual[name] for name in expected}, expected, 2e-5, atol=2e-6)


def test_masks_by_a_large_negative_number():
    call, _ = make(4, hide=torch.finfo(torch.float32).min)
    other, _ = make(4)
    actual, expected = stats_of(call)[0], stats_of(other)[0]
    assert_stats_close(actual, expected, 1e-6)


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.25, 3.0])
def test_jacobian_is_that_of_autograd(alpha):
    """The spectral norm of the derivative, row by row, on rows of any sharpness."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        n = int(rng.integers(1, 14))
        z = torch.from_numpy(rng.normal(size=n) * 10.0 ** rng.uniform(-2, 1))
        if alpha == 2.0:
            derivative = torch.autograd.functional.jacobian(lambda x: entmax.sparsemax(x[None])[0], z)
            p = entmax.sparsemax(z[None])[0]
        else:
            derivative = torch.autograd.functional.jacobian(
                lambda x: entmax.entmax_bisect(x[None], alpha=alpha, n_iter=80)[0], z
            )
            p = entmax.entmax_bisect(z[None], alpha=alpha, n_iter=80)[0]
        norm = float(torch.linalg.matrix_norm(derivative, ord=2))
        assert float(largest_sensitivity(p, alpha)) == pytest.approx(norm, rel=1e-6, abs=1e-9)
        if alpha == 2.0:
            assert norm == pytest.approx(1.0 if int((p > 0).sum()) >= 2 else 0.0, abs=1e-9)


def test_sparsemax_is_as_sensitive_whatever_its_support():
    for size in (1, 2, 5, 6, 40):
        p = torch.zeros(2, 64)
        p[:, :size] = 1.0 / size
        expected = 0.0 if size == 1 else 1.0
        assert largest_sensitivity(p, 2.0).tolist() == pytest.approx([expected] * 2, abs=1e-6)


def test_alpha_one_is_softmax():
    z = torch.randn(20, 30, generator=torch.Generator().manual_seed(6)) * 3.0
    p = torch.softmax(z.double(), -1)
    expected = [float(torch.linalg.eigvalsh(torch.diag(row) - torch.outer(row, row))[-1]) for row in p]
    assert largest_sensitivity(p, 1.0).tolist() == pytest.approx(expected, rel=1e-6)


def test_rows_that_say_nothing_are_counted_apart():
    call, _ = make(7, batch=1, heads=1, length=6)
    logits, weights = call.logits.clone(), call.weights.clone()
    logits[0, 0, 2, 1] = math.nan
    weights[0, 0, 3, 1] = math.nan
    logits[0, 0, 4] = -math.inf  # nothing visible
    broken = AttentionCall(
        query=None, key=None, value=call.value, scale=0.5, head_dim=4, logits=logits, weights=weights, alpha=1.5,
        normalizer=call.normalizer,
    )  # fmt: skip
    found, packing, matrix = stats_of(broken, top_n=2)
    assert packing.rows(matrix).tolist() == [3]
    assert {reason: count.tolist() for reason, count in packing.excluded(matrix).items()} == {
        "padding": [0], "masked": [1], "nonfinite": [2]
    }  # fmt: skip
    absent = ("sink_mass", "max_logit_uncapped")
    assert all(bool(value.isfinite().all()) for name, value in found.items() if name not in absent)


def test_zero_vectors_and_garbage_in_hidden_values():
    call, alphas = make(8)
    value = call.value.clone()
    value[0, :, 3] = 0.0
    expected = weight_stats(call.logits, call.weights, value, alphas, top_n=4)
    spoiled = torch.nn.functional.pad(value, (0, 0, 0, 2), value=math.nan)
    pad = {"logits": torch.nn.functional.pad(call.logits, (0, 2), value=-math.inf)}
    pad["weights"] = torch.nn.functional.pad(call.weights, (0, 2))
    wide = AttentionCall(
        query=None, key=None, value=spoiled, scale=0.5, head_dim=4, alpha=1.5, normalizer=call.normalizer,
        is_cross=True, **pad,
    )  # fmt: skip
    actual, _, _ = stats_of(wide)
    assert_stats_close({name: actual[name] for name in expected}, expected, 2e-5, atol=2e-6)
