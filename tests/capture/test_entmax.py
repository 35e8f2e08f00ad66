"""Sparsemax and entmax in the place of softmax: seen in any way they are called, and nothing is changed by it."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import attnmon
from attnmon.capture.routes.eager_tracker import EagerTracker
from attnmon.capture.routes.entmax import describe_normalizer
from tests.helpers import assert_stats_close, slow_but
from tests.stats.weights_oracle import weight_stats

entmax = pytest.importorskip("entmax")
from entmax import entmax15, entmax_bisect, normmax_bisect, sparsemax, sparsemax_bisect  # noqa: E402

HEADS, LENGTH, WIDTH = 3, 14, 12
EVERY_ROW = {"rows": None, "sequences": None, "top_n": 4, "on_error": "raise"}


class SparseAttention(nn.Module):
    """Causal; keeps what its normalizer read and made."""

    def __init__(self, normalizer, hide=float("-inf")):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.normalizer, self.hide = normalizer, hide
        self.seen = None

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        q, k, v = self.qkv(hidden).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * 2.0
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, self.hide)
        weights = self.normalizer(scores)
        self.seen = (scores.detach(), weights.detach(), v.detach())
        return (weights @ v).transpose(1, 2).flatten(2)


class AdaptiveAttention(SparseAttention):
    """A learned alpha for each head (adaptively sparse transformers, arXiv 1909.00015)."""

    def __init__(self):
        super().__init__(lambda scores: entmax_bisect(scores, alpha=1.0 + torch.sigmoid(self.alpha), dim=-1))
        self.alpha = nn.Parameter(torch.linspace(-1.0, 1.5, HEADS).view(HEADS, 1, 1))


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


WAYS = {
    "sparsemax": (lambda scores: sparsemax(scores, dim=-1), 2.0),
    "sparsemax by its package": (lambda scores: entmax.sparsemax(scores, -1, 5), 2.0),
    "entmax15": (lambda scores: entmax15(scores), 1.5),
    "entmax15 with k": (lambda scores: entmax15(X=scores, k=4), 1.5),
    "sparsemax_bisect": (lambda scores: sparsemax_bisect(scores), 2.0),
    "entmax_bisect": (lambda scores: entmax_bisect(scores, 1.3), 1.3),
    "entmax_bisect by an option": (lambda scores: entmax.entmax_bisect(scores, alpha=torch.tensor(1.7)), 1.7),
}
MODULES = {
    "sparsemax": (entmax.Sparsemax, 2.0),
    "entmax15": (entmax.Entmax15, 1.5),
    "entmax_bisect": (lambda: entmax.EntmaxBisect(alpha=1.4), 1.4),
    "sparsemax_bisect": (entmax.SparsemaxBisect, 2.0),
}


def hidden_states(seed=2, length=LENGTH):
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(model, alphas, route, **options):
    with attnmon.watch(model, **EVERY_ROW, **options) as monitor:
        with monitor.step():
            model(hidden_states()).sum().backward()
        snapshot = monitor.flush()
        assert [record.route for record in monitor.coverage()] == [route] * 2
    assert snapshot.modules == ("layers.0", "layers.1")
    for path, layer in zip(snapshot.modules, model.layers, strict=True):
        scores, weights, values = layer.seen
        tau = 1.0 / (2.0 * (WIDTH // HEADS) ** 0.5)
        expected = weight_stats(scores, weights, values, alphas, top_n=4, tau=tau)
        actual = {name: torch.from_numpy(snapshot[name][path]) for name in expected}
        assert_stats_close(actual, expected, 2e-5, atol=2e-6)
        assert snapshot.rows[path].tolist() == [2 * LENGTH] * HEADS


HIDDEN = {"inf": float("-inf"), "min": torch.finfo(torch.float32).min}
QUICK = {("sparsemax", "min"), ("entmax_bisect", "inf")}


@pytest.mark.parametrize(
    ("way", "hide"),
    [
        pytest.param(way, HIDDEN[name], id=f"{way}-{name}", marks=() if (way, name) in QUICK else pytest.mark.slow)
        for way in WAYS
        for name in HIDDEN
    ],
)
def test_functions(way, hide):
    function, alpha = WAYS[way]
    check(Model(lambda: SparseAttention(function, hide)), [alpha] * HEADS, way.split()[0])


@pytest.mark.parametrize("route", slow_but(("entmax15",), MODULES))
def test_modules(route):
    make, alpha = MODULES[route]
    check(Model(lambda: SparseAttention(make())), [alpha] * HEADS, route)


def test_an_alpha_for_each_head():
    model = Model(AdaptiveAttention)
    alphas = (1.0 + torch.sigmoid(model.layers[0].alpha.detach())).flatten().tolist()
    check(model, alphas, "entmax_bisect")


def test_training_is_the_same_to_the_bit():
    def train(model, monitor=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
        for step in range(3):
            if monitor is not None:
                with monitor.step():
                    model(hidden_states(step)).square().sum().backward()
            else:
                model(hidden_states(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    plain = train(Model(AdaptiveAttention))
    model = Model(AdaptiveAttention)
    with attnmon.watch(model, top_n=4, rows=4, sequences=1, on_error="raise") as monitor:
        watched = train(model, monitor)
        assert monitor.flush().modules == ("layers.0", "layers.1")
    assert all(bool(parameter.isfinite().all()) for parameter in plain.values())
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_the_functions_are_put_back():
    held = {
        (module, name): vars(sys.modules[module])[name]
        for module in ("entmax", "entmax.activations", "entmax.root_finding", __name__)
        for name in ("sparsemax", "entmax15", "entmax_bisect", "sparsemax_bisect", "normmax_bisect")
        if name in vars(sys.modules[module])
    }
    model = Model(lambda: SparseAttention(WAYS["entmax15"][0]))
    with attnmon.watch(model, **EVERY_ROW) as monitor:
        with monitor.step():
            assert all(vars(sys.modules[module])[name] is not found for (module, name), found in held.items())
            assert sparsemax.__name__ == "sparsemax"
            model(hidden_states())
        with pytest.raises(ZeroDivisionError), monitor.step():
            raise ZeroDivisionError
    assert all(vars(sys.modules[module])[name] is found for (module, name), found in held.items())


def refusals(model, **options):
    with attnmon.watch(model, **options) as monitor:
        with pytest.warns(attnmon.AttnmonWarning), monitor.step():
            model(hidden_states())
        records = monitor.coverage()
    assert {record.status for record in records} == {"skipped"}
    return {record.reason for record in records}


def test_what_is_refused():
    per_row = torch.linspace(1.2, 1.8, LENGTH).view(LENGTH, 1)
    assert refusals(Model(lambda: SparseAttention(lambda scores: normmax_bisect(scores)))) == {
        "normmax_bisect makes weights whose Jacobian attnmon does not know"
    }
    assert refusals(Model(lambda: SparseAttention(lambda scores: entmax_bisect(scores, alpha=per_row)))) == {
        "entmax_bisect with an alpha that differs within a head"
    }
    assert refusals(Model(lambda: SparseAttention(lambda scores: sparsemax(scores.nan_to_num(-1e9), dim=-2)))) == {
        "a softmax over another axis than the last"
    }


@pytest.mark.slow
def test_compiling_around_the_functions():
    """The compiler itself breaks its graph at them; the monitor does not see these calls, and says so."""
    torch._dynamo.reset()
    model = Model(lambda: SparseAttention(WAYS["entmax15"][0]))
    compiled = torch.compile(model, backend="aot_eager")
    before = compiled(hidden_states())
    with attnmon.watch(model) as monitor:
        with pytest.warns(attnmon.AttnmonWarning), monitor.step():
            out = compiled(hidden_states())
        assert {record.status for record in monitor.coverage()} == {"skipped"}
    assert torch.equal(out, before)


def test_a_graph_that_holds_the_function_refuses_the_call(monkeypatch):
    """Should the compiler come to trace them."""

    class Listener:
        def refused(self, reason, tensor):
            self.reason = reason

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    tracker, (query, scores) = EagerTracker(Listener()), torch.randn(2, 1, 2, 4, 4)
    tracker.saw(torch.matmul, (query, query), {}, scores)
    tracker.normalized(describe_normalizer("entmax15", entmax15, (scores,), {}, entmax15(scores)))
    assert tracker._listener.reason == "entmax15 in a compiled graph"


def test_sampled_rows_and_classifiers_beside():
    """A normalizer whose result weighs nothing is no attention; sampling takes rows of logits and weights alike."""

    class Classified(Model):
        def forward(self, hidden):
            return entmax15(super().forward(hidden).transpose(1, 2), dim=-1)

    model = Classified(lambda: SparseAttention(WAYS["entmax15"][0]))
    with attnmon.watch(model, rows=5, sequences=1, top_n=2, on_error="raise") as monitor:
        with monitor.step():
            model(hidden_states()).sum().backward()
        snapshot = monitor.flush()
    assert snapshot.modules == ("layers.0", "layers.1")
    assert snapshot.rows["layers.0"].tolist() == [5] * HEADS
    assert np.isfinite(snapshot["jacobian"]["layers.1"]).all()
