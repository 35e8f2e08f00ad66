"""The softmax Jacobian in four norms, against the matrix itself, eigenvalues, autograd and the live metrics."""

import math

import numpy as np
import pytest
import torch

from attnmon.errors import AttnmonError
from attnmon.stats.reference import row_stats, secular_eigenvalue, softmax_row
from attnmon.theory import (
    eigenvalue_estimates,
    entry_bound,
    finite_difference,
    finite_difference_bound,
    frobenius_norm,
    infinity_norm,
    largest_entry,
    norm_bound,
    paper_expression,
    row_directions,
    spectral_norm,
)
from tests.theory.cases import SLACK, rows

NORMS = {
    spectral_norm: lambda j: np.linalg.norm(j, 2),
    frobenius_norm: np.linalg.norm,
    largest_entry: lambda j: np.abs(j).max(),
    infinity_norm: lambda j: np.abs(j).sum(1).max(),
}


def outcomes(with_sink):
    """(p of the keys, p of the sink or None, z) of every row."""
    rng = np.random.default_rng(0)
    for row in rows():
        z = row.z[row.visible]
        if not with_sink:
            yield row.p, None, z
            continue
        p = softmax_row(np.append(z, rng.normal() * 4))[0]
        yield p[:-1], p[-1], z


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_those_of_the_matrix_and_bounds_hold(norm, with_sink):
    tau = 0.37
    bound = entry_bound(tau) if norm is largest_entry else norm_bound(tau)
    for p, sink, _ in outcomes(with_sink):
        got = float(norm(torch.tensor(p), tau, None if sink is None else torch.tensor(sink)))
        assert got == pytest.approx(NORMS[norm]((np.diag(p) - np.outer(p, p)) / tau), rel=1e-10, abs=1e-14)
        assert got <= bound * SLACK


def test_the_matrix_is_the_derivative():
    for row in rows()[:60]:
        logits, tau = torch.tensor(row.z[row.visible]), 0.6
        j = torch.autograd.functional.jacobian(lambda at, t=tau: torch.softmax(at / t, -1), logits)
        p = torch.softmax(logits / tau, -1)
        for norm, of_matrix in NORMS.items():
            assert float(norm(p, tau)) == pytest.approx(of_matrix(j.numpy()), rel=1e-9, abs=1e-12)


def test_bounds_are_reached():
    tie = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    for tau in (0.1, 1.0, 8.0):
        for norm in (spectral_norm, frobenius_norm, infinity_norm):
            assert float(norm(tie, tau)) == pytest.approx(norm_bound(tau), rel=1e-15)
        assert float(largest_entry(tie, tau)) == pytest.approx(entry_bound(tau), rel=1e-15)
    spread = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # one weight of 1/2 is enough for these two
    assert float(infinity_norm(spread)) == 0.5
    assert float(largest_entry(spread)) == 0.25


def test_the_papers_spectral_bound_fails():
    tie = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert float(spectral_norm(tie, 0.1)) == pytest.approx(5.0)
    assert paper_expression(0.1) == math.sqrt(2)
    assert float(spectral_norm(tie)) == 0.5
    assert paper_expression(1.0) == 0.25
    over = sum(float(spectral_norm(torch.tensor(p))) > paper_expression(1.0) for p, _, _ in outcomes(False))
    assert over > 40


def test_the_exact_norm_keeps_its_digits_in_one_hot_rows():
    rng = np.random.default_rng(1)
    for _ in range(500):
        p, rest, _ = softmax_row(rng.normal(size=int(rng.integers(2, 120))) * 10 ** rng.uniform(-3, 1.3))
        expected = secular_eigenvalue(p, rest)
        assert float(spectral_norm(torch.tensor(p))) == pytest.approx(expected, rel=1e-12)
        frobenius = float(frobenius_norm(torch.tensor(p)))
        assert expected <= frobenius * SLACK
        assert frobenius <= expected * math.sqrt(p.size)


def test_estimates_enclose_the_eigenvalue():
    for with_sink in (False, True):
        for p, sink, _ in outcomes(with_sink):
            outside = None if sink is None else torch.tensor(sink)
            low, high = (float(value) for value in eigenvalue_estimates(torch.tensor(p), outside))
            exact = float(spectral_norm(torch.tensor(p), 1.0, outside))
            assert low <= exact * SLACK
            assert exact <= high * SLACK


def test_the_finite_difference_is_the_live_one_and_stays_under_its_bound():
    rng = np.random.default_rng(2)
    over_papers = 0
    for index, row in enumerate(rows()):
        z = row.z if index % 2 else row.z[:3] * 0.1
        visible = row.visible if index % 2 else np.ones(3, dtype=bool)
        tau, eps = float(10 ** rng.uniform(-2, 1)), float(rng.choice([1e-3, 0.1, 10.0]))
        direction = row_directions(torch.tensor([index]), z.size)[0]
        got = float(finite_difference(torch.tensor(z * tau), direction, tau, eps, torch.tensor(visible)))
        live = row_stats(
            z[visible],
            tau=tau,
            query_position=index,
            key_positions=np.flatnonzero(visible),
            fd_epsilon=eps,
        )
        assert got == pytest.approx(live["jacobian_fd"], rel=1e-6, abs=1e-30)
        assert 0.0 <= got <= finite_difference_bound(tau, eps) * SLACK
        over_papers += got > paper_expression(tau) * SLACK
    assert over_papers > 10


def test_the_finite_difference_tends_to_the_derivative():
    for row in rows()[:40]:
        logits = torch.tensor(row.z)
        v = torch.randn(row.z.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        v /= v.norm()
        p = torch.softmax(logits / 0.5, -1)
        moved = v - v[p.argmax()]  # J is blind to a common shift, and this one cancels nothing
        expected = float(((p * moved - p * (p @ moved)) / 0.5).norm())
        assert float(finite_difference(logits, 3.0 * v, 0.5, 1e-7)) == pytest.approx(expected, rel=1e-5, abs=1e-30)


def test_steps_of_any_size_agree_in_float32():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(50, 64, generator=generator, dtype=torch.float64) * 3
    directions = torch.randn(50, 64, generator=generator, dtype=torch.float64)
    for tau in (0.001, 0.01, 0.1, 1.0, 10.0):
        for eps in (1e-3, 0.1, 10.0):
            exact = finite_difference(logits, directions, tau, eps)
            single = finite_difference(logits.float(), directions.float(), tau, eps)
            assert single.dtype == torch.float32
            assert exact.isfinite().all()
            # logits rounded to float32 and divided by tau: a relative error of |l| / tau * 2^-24 in every weight
            torch.testing.assert_close(single.double(), exact, rtol=2e-6 * (1 + 12 / tau), atol=1e-30)


def test_both_weights_of_a_step_too_large_for_exp():
    logits, direction = torch.tensor([0.0, 0.0, -5.0]), torch.tensor([-1.0, 1.0, 0.0])
    assert float(finite_difference(logits, direction, 1e-3, 10.0)) == pytest.approx(math.sqrt(0.5) / 10, rel=1e-6)


def test_a_large_step_of_a_frozen_row_keeps_its_digits():
    logits, direction = torch.tensor([0.0, -200.0], dtype=torch.float64), torch.tensor([-1.0, 1.0])
    eps = 100.0 / math.sqrt(2.0)  # the second logit gains 100 on the first, and both weights move by exp(-100)
    expected = math.sqrt(2.0) * math.exp(-100.0) / eps
    assert float(finite_difference(logits, direction, 1.0, eps)) == pytest.approx(expected, rel=1e-12)


def test_low_temperature_means_blow_up_at_a_tie_and_freezing_elsewhere():
    def worst(gap):
        temperatures = torch.linspace(0.05, 5.0, 4000, dtype=torch.float64) * gap
        weights = torch.softmax(torch.stack([torch.full_like(temperatures, gap) / temperatures,
                                             torch.zeros_like(temperatures)], -1), -1)  # fmt: skip
        norms = spectral_norm(weights) / temperatures
        return float(norms.max()), float(temperatures[norms.argmax()])

    for gap in (0.1, 1.0, 7.0):
        norm, temperature = worst(gap)
        assert norm == pytest.approx(0.448 / gap, rel=2e-3)
        assert temperature == pytest.approx(0.648 * gap, rel=5e-3)
    frozen = spectral_norm(torch.softmax(torch.tensor([10.0, 0.0], dtype=torch.float64), -1), 0.1)
    assert float(frozen) == pytest.approx(0.0009, abs=5e-5)
    assert float(spectral_norm(torch.tensor([0.5, 0.5]), 0.1)) == pytest.approx(5.0)


def test_g_follows_one_over_t_only_at_ties():
    """The paper's curve over T is a mixture of rows: at a tie g T is constant, at separated logits g vanishes."""
    direction = torch.tensor([1.0, -1.0], dtype=torch.float64)
    tied = [float(finite_difference(torch.zeros(2).double(), direction, t, 1e-6)) * t for t in (0.001, 0.01, 0.1)]
    assert tied == pytest.approx([0.5] * 3, rel=1e-3)
    apart = [float(finite_difference(torch.tensor([1.0, 0.0]).double(), direction, t, 1e-6)) for t in (0.1, 0.05, 0.01)]
    assert apart[0] > 1e3 * apart[1] > 1e6 * apart[2]


def test_single_keys_and_shapes():
    assert float(spectral_norm(torch.ones(1))) == 0.0
    assert float(frobenius_norm(torch.ones(1))) == 0.0
    one = torch.tensor([0.25])
    assert float(spectral_norm(one, 1.0, torch.tensor(0.75))) == pytest.approx(0.1875)
    weights = torch.softmax(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(5)), -1)
    for norm in NORMS:
        assert norm(weights).shape == (2, 3)
        assert norm(weights).dtype == torch.float32


def test_the_exact_norm_carries_no_gradient():
    logits = torch.randn(2, 1024, generator=torch.Generator().manual_seed(6), requires_grad=True)
    weights = torch.softmax(logits, -1)
    norm = spectral_norm(weights)
    assert not norm.requires_grad
    assert torch.equal(norm, spectral_norm(weights.detach()))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_temperatures_and_steps_are_positive(bad):
    with pytest.raises(AttnmonError, match="tau must be a finite number > 0; got"):
        spectral_norm(torch.ones(2), bad)
    with pytest.raises(AttnmonError, match="eps must be a finite number > 0; got"):
        finite_difference_bound(1.0, bad)
