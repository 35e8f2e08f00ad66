"""Other normalizers: weights by their formulas, Jacobians against autograd, entropies, the comparison."""

import builtins
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from attnmon.errors import AttnmonError, MissingExtra
from attnmon.stats.reference import row_stats
from attnmon.theory.lowrank import spectral_norm_low_rank
from attnmon.theory.normalizers import (
    Entmax,
    General,
    ScalableSoftmax,
    SelfAdjustedSoftmax,
    Sigmoid,
    Softmax,
    SoftmaxWithSink,
    Sparsemax,
    compare,
    default_normalizers,
)
from tests.helpers import slow_but

pytest.importorskip("entmax")

ALL = (
    *default_normalizers(),
    Softmax(0.3),
    SoftmaxWithSink(1.3, 0.7),
    ScalableSoftmax(0.43),
    Sparsemax(2.5),
    Entmax(1.25),
    Entmax(1.7, 0.5),
    Entmax(3.0),
    Sigmoid(-1.0, 0.6),
    General(softplus, "softplus"),
    General(lambda x: 1.0 + x.square(), "1 + l^2"),
)
LABELS = [normalizer.label for normalizer in ALL]


def logit_rows(count=60, seed=0, shift=0.0):
    """(logits, mask) of short rows, some keys hidden and with garbage."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(2, 10))
        visible = rng.random(n) < 0.75
        visible[rng.permutation(n)[:2]] = True
        yield torch.tensor(rng.normal(size=n) * rng.uniform(0.2, 4.0) + shift), torch.tensor(visible)


def test_labels_are_distinct():
    assert len(set(LABELS)) == len(LABELS)


@pytest.mark.parametrize("shift", slow_but((0.0,), (0.0, 9.0, -9.0)))
@pytest.mark.parametrize("normalizer", ALL, ids=LABELS)
def test_jacobian_norm_is_that_of_autograd(normalizer, shift):
    for logits, mask in logit_rows(shift=shift):
        j = torch.autograd.functional.jacobian(lambda at, m=mask: normalizer.weights(at, m), logits)
        expected = float(torch.linalg.matrix_norm(j, 2))
        size = float(j.abs().max()) + 1.0
        got = float(normalizer.jacobian_norm(logits, mask))
        # where all of J nearly cancels, diag - low rank keeps the square root of float64's digits
        assert got == pytest.approx(expected, rel=1e-7, abs=2e-8 * size)


@pytest.mark.parametrize("normalizer", slow_but(ALL[::2], ALL), ids=LABELS)
def test_weights_are_those_of_the_visible_keys_alone(normalizer):
    for logits, mask in logit_rows(seed=1):
        weights = normalizer.weights(logits, mask)
        torch.testing.assert_close(weights[mask], normalizer.weights(logits[mask]), rtol=1e-12, atol=1e-14)
        assert (weights[~mask] == 0.0).all()
        total = float(weights.sum())
        assert (total == pytest.approx(1.0, rel=1e-12)) or not normalizer.sums_to_one
        for method in (normalizer.entropy, normalizer.jacobian_norm):
            assert float(method(logits, mask)) == pytest.approx(float(method(logits[mask])), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("normalizer", ALL, ids=LABELS)
def test_entropy_is_that_of_the_shares(normalizer):
    for logits, _ in logit_rows(seed=2):
        alpha = normalizer.weights(logits).abs()
        if isinstance(normalizer, SoftmaxWithSink):  # the sink is one more outcome
            alpha = torch.cat([alpha, 1.0 - alpha.sum(-1, keepdim=True)])
        shares = alpha / alpha.sum()
        expected = -sum(float(share) * math.log(float(share)) for share in shares if share > 0)
        got = float(normalizer.entropy(logits))
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert got <= float(normalizer.max_entropy(torch.tensor(float(logits.numel())))) + 1e-12


def test_formulas():
    logits = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    exp, p = logits.exp(), torch.softmax(logits, -1)
    close = torch.testing.assert_close
    close(SoftmaxWithSink().weights(logits), exp / (1.0 + exp.sum()))  # off by one
    close(SoftmaxWithSink(0.7).weights(logits), exp / (math.exp(0.7) + exp.sum()))
    close(ScalableSoftmax(0.5).weights(logits), torch.softmax(0.5 * math.log(3) * logits, -1))
    close(SelfAdjustedSoftmax().weights(logits), logits * p)
    close(SelfAdjustedSoftmax(normalized=True).weights(logits), (logits + 0.5) / 1.5 * p)
    close(SelfAdjustedSoftmax(normalized=True).weights(logits + 2.0), (logits + 2.0) / 3.0 * p)
    close(Sigmoid().weights(logits), torch.sigmoid(logits - math.log(3)))
    close(Sparsemax().weights(logits), torch.tensor([0.85, 0.0, 0.15], dtype=torch.float64))
    close(General(torch.exp, "exp").weights(logits), p)


def test_softmax_agrees_with_the_live_metrics():
    for logits, mask in logit_rows(seed=3):
        for tau in (0.3, 1.0):
            live = row_stats(logits[mask].numpy() / tau, tau=tau)
            assert float(Softmax(tau).jacobian_norm(logits, mask)) == pytest.approx(live["jacobian"], rel=1e-9)
            assert float(Softmax(tau).entropy(logits, mask)) == pytest.approx(live["entropy"], rel=1e-12)
        live = row_stats(logits[mask].numpy(), sink=0.4)
        sink = SoftmaxWithSink(0.4)
        assert float(sink.jacobian_norm(logits, mask)) == pytest.approx(live["jacobian"], rel=1e-9)
        assert float(sink.entropy(logits, mask)) == pytest.approx(live["entropy"], rel=1e-12)


def test_sparsemax_norm_is_one_over_t_or_nothing():
    logits = torch.tensor([[0.2, 0.0, -3.0], [5.0, 0.0, 0.0]], dtype=torch.float64)
    assert Sparsemax(2.0).jacobian_norm(logits / 0.5).tolist() == [0.5, 0.0]


def test_entmax_lies_between_softmax_and_sparsemax():
    for logits, _ in logit_rows(seed=4, count=20):
        near = Entmax(1.0001)
        torch.testing.assert_close(near.weights(logits), Softmax().weights(logits), rtol=0, atol=2e-3)
        torch.testing.assert_close(Entmax(2.0).weights(logits), Sparsemax().weights(logits))
        bisected = Entmax(1.5 + 1e-9)  # through the package's other function
        torch.testing.assert_close(Entmax(1.5).weights(logits), bisected.weights(logits), rtol=1e-6, atol=1e-8)


def test_general_form_bound_holds():
    """|J|_2 <= max |F'/F| / 2, and it is reached: F = exp at a tie."""
    for function in (softplus, lambda x: 1.0 + x.square(), torch.exp):
        form = General(function, "F")
        for logits, mask in logit_rows(seed=5):
            assert float(form.jacobian_norm(logits, mask)) <= float(form.jacobian_bound(logits, mask)) * (1 + 1e-9)
    tie = torch.zeros(2, dtype=torch.float64)
    assert float(General(torch.exp, "exp").jacobian_norm(tie)) == pytest.approx(0.5)
    assert float(General(torch.exp, "exp").jacobian_bound(tie)) == 0.5


def test_the_scalable_norm_may_grow_with_ln_n():
    norms = []
    for n in (16, 256):
        logits = torch.full((n,), -50.0, dtype=torch.float64)
        logits[:2] = 0.0
        norms.append(float(ScalableSoftmax(1.0).jacobian_norm(logits)))
    assert norms == pytest.approx([0.5 * math.log(16), 0.5 * math.log(256)], rel=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_rank_norm_against_singular_values(rank):
    rng = np.random.default_rng(6)
    for n in (1, 2, 5, 70):
        d, u, v = rng.normal(size=(20, n)), rng.normal(size=(20, n, rank)), rng.normal(size=(20, n, rank))
        d[:5], u[5:10, :, 0] = d[:5].round(0), 0.0
        got = spectral_norm_low_rank(torch.tensor(d), torch.tensor(u), torch.tensor(v))
        for index in range(20):
            expected = np.linalg.norm(np.diag(d[index]) - u[index] @ v[index].T, 2)
            assert float(got[index]) == pytest.approx(expected, rel=1e-9, abs=1e-7)


def test_low_rank_norm_says_nan_where_the_input_is():
    d = torch.tensor([[1.0, math.nan], [2.0, 1.0]], dtype=torch.float64)
    got = spectral_norm_low_rank(d, torch.zeros(2, 2, 1).double(), torch.zeros(2, 2, 1).double())
    assert got[0].isnan()
    assert float(got[1]) == pytest.approx(2.0)


def test_the_comparison_is_tidy():
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(2, 12, 12, generator=generator) * 2.0
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    records = compare(logits, visible=mask)
    keys = {"normalizer", "sums_to_one", "entropy_of", "metric", "value", "rows"}
    assert all(set(record) == keys for record in records)
    table = {(record["normalizer"], record["metric"]): record for record in records}
    assert len(table) == len(records) == 7 * len(default_normalizers())
    softmax = Softmax()
    norms = softmax.jacobian_norm(logits, mask)
    assert table[softmax.label, "jacobian"]["value"] == pytest.approx(float(norms.mean()), rel=1e-6)
    assert table[softmax.label, "jacobian_max"]["value"] == pytest.approx(float(norms.max()), rel=1e-6)
    assert table[softmax.label, "entropy_norm"]["rows"] == 22  # rows of one key have none
    assert table[Sparsemax().label, "support"]["value"] < table[softmax.label, "support"]["value"] == 1.0
    unnormalized = {record["normalizer"] for record in records if not record["sums_to_one"]}
    assert unnormalized == {
        SoftmaxWithSink().label,
        SelfAdjustedSoftmax().label,
        SelfAdjustedSoftmax(normalized=True).label,
        Sigmoid().label,
    }


def test_bad_parameters_are_refused():
    for make in (
        lambda: Softmax(0.0),
        lambda: SoftmaxWithSink(math.inf),
        lambda: ScalableSoftmax(-1.0),
        lambda: Entmax(1.0),
        lambda: Sparsemax(-1.0),
        lambda: Sigmoid(temperature=math.nan),
        lambda: Softmax().weights(torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(AttnmonError):
            make()


def test_without_entmax_the_extra_is_named(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "entmax":
            raise ModuleNotFoundError(name="entmax")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"attnmon\[paper\]"):
        Sparsemax().weights(torch.zeros(3))
