"""Experiment 5 at all temperatures at once against the definitions, one temperature at a time in float64."""

import pytest
import torch

from attnmon.paper import temperatures as module
from attnmon.paper.options import EPSILONS, TEMPERATURES
from attnmon.paper.temperatures import sensitivities
from attnmon.theory.jacobian import finite_difference, finite_difference_bound, row_directions, spectral_norm

LENGTH = 90
KINDS = ("flat", "sharp", "tied", "one key apart", "window")


def rows(kind):
    """Logits, directions and visible keys of causal rows."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(LENGTH, LENGTH, generator=generator)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if kind == "sharp":
        logits *= 30.0
    elif kind == "tied":
        logits = logits.round()
    elif kind == "one key apart":  # nearly one-hot, frozen at low T
        logits[:, 0] += 15.0
    elif kind == "window":
        visible &= torch.ones_like(visible).triu(-6)
    hidden = torch.where(visible, logits, 1e4)  # garbage above every logit
    return hidden, row_directions(torch.arange(LENGTH), LENGTH), visible


@pytest.mark.parametrize("block", [32, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_as_the_definitions_have_it(kind, block, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", block)
    logits, directions, visible = rows(kind)
    g, norm = sensitivities(logits, directions, visible, TEMPERATURES, EPSILONS)
    assert g.shape == (len(TEMPERATURES), len(EPSILONS), LENGTH)
    for t, temperature in enumerate(TEMPERATURES):
        # |l| / T in float32: a relative error of that times 2^-24 in every weight
        rtol = 1e-5 * (1 + 1 / temperature)
        weights = torch.softmax((logits.double() / temperature).masked_fill(~visible, -torch.inf), -1)
        expected = spectral_norm(weights, temperature)
        torch.testing.assert_close(norm[t].double(), expected, rtol=rtol, atol=1e-25)
        assert float(norm[t].double().mean()) == pytest.approx(float(expected.mean()), rel=1e-5, abs=1e-15)
        for e, epsilon in enumerate(EPSILONS):
            expected = finite_difference(logits.double(), directions.double(), temperature, epsilon, visible)
            torch.testing.assert_close(g[t, e].double(), expected, rtol=rtol, atol=1e-12)
            assert float(g[t, e].double().mean()) == pytest.approx(float(expected.mean()), rel=1e-5, abs=1e-15)
            assert (g[t, e] <= finite_difference_bound(temperature, epsilon) * (1 + 1e-5)).all()


def test_a_row_of_one_key_does_not_move():
    g, norm = sensitivities(*rows("flat"), TEMPERATURES, EPSILONS)
    assert (g[..., 0] < 1e-30).all()  # hidden keys keep the least weight that there is
    assert (norm[:, 0] < 1e-30).all()


def test_a_tie_is_the_worst_case_at_every_temperature():
    logits, visible = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool).tril()
    g, norm = sensitivities(logits, torch.tensor([[1.0, 0.0], [1.0, -1.0]]), visible, TEMPERATURES, (1e-3, 10.0))
    bound = 0.5 / torch.tensor(TEMPERATURES)
    torch.testing.assert_close(norm[:, 1], bound)
    torch.testing.assert_close(g[4:, 0, 1], bound[4:], rtol=1e-2, atol=0.0)
    assert float(g[0, 1, 1]) == pytest.approx(2**-0.5 / 10.0)  # both weights go to one key
