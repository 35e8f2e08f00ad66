"""The kernels are trusted with a kind of call only after they were seen to agree with the streaming implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attnmon
from attnmon.call import make_call
from attnmon.metrics import METRICS
from attnmon.run import backend_choice as reducer
from attnmon.run.backend_choice import BackendChoice, disagreement
from attnmon.stats.api import measure
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings

SETTINGS = Settings.create(rows=8, top_n=4)
PACKING = Packing(SETTINGS.metrics)


def _call(seed=0, heads=2, **options):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, 40, 8, generator=generator) for _ in range(3))
    return make_call(q, k, v, **options)


class _Kernels:
    """Stands in for a GPU: the streaming numbers, or what ``change`` makes of them."""

    def __init__(self, monkeypatch, change=lambda matrix: matrix):
        self.calls, self.change = [], change
        monkeypatch.setattr(
            reducer, "choose_backend", lambda backend, call, settings: "triton" if backend != "torch" else "torch"
        )
        monkeypatch.setattr(reducer, "measure", self)

    def __call__(self, call, settings, plan, packing, backend):
        self.calls.append(backend)
        found = measure(call, settings, plan, packing, "torch")
        return self.change(found) if backend == "triton" else found


def _reduce(reduce, call):
    return reduce(call, make_plan(call, SETTINGS))


def test_kernels_that_agree_are_compared_once_a_kind(monkeypatch):
    kernels = _Kernels(monkeypatch)
    notes = []
    reduce = BackendChoice(SETTINGS, PACKING, "auto", notes.append)
    assert [_reduce(reduce, _call(seed))[1] for seed in range(3)] == ["torch", "triton", "triton"]
    assert sorted(kernels.calls) == ["torch", "triton", "triton", "triton"]
    kernels.calls.clear()
    assert [_reduce(reduce, _call(seed, is_causal=True))[1] for seed in range(2)] == ["torch", "triton"]
    assert not notes


@pytest.mark.parametrize("change_by", [0.01, math.nan, math.inf])
def test_kernels_that_disagree_are_not_used_for_that_kind(monkeypatch, change_by):
    column = PACKING.columns.index("entropy")

    def change(matrix):
        matrix[column, 1] *= 1.0 + change_by
        return matrix

    kernels = _Kernels(monkeypatch, change)
    notes = []
    reduce = BackendChoice(SETTINGS, PACKING, "auto", notes.append)
    for seed in range(3):
        call = _call(seed)
        matrix, backend = _reduce(reduce, call)
        assert backend == "torch"
        assert torch.equal(matrix, measure(call, SETTINGS, make_plan(call, SETTINGS), PACKING, "torch"))
    assert kernels.calls.count("triton") == 1
    assert len(notes) == 1
    assert "entropy of head 1" in notes[0]


def test_kernels_that_do_not_compile_are_not_used(monkeypatch):
    def change(matrix):
        raise RuntimeError("no such instruction\nmany lines of it")

    kernels = _Kernels(monkeypatch, change)
    notes = []
    reduce = BackendChoice(SETTINGS, PACKING, "auto", notes.append)
    assert [_reduce(reduce, _call(seed))[1] for seed in range(3)] == ["torch"] * 3
    assert kernels.calls.count("triton") == 1
    assert "RuntimeError: no such instruction" in notes[0]
    assert "\n" not in notes[0]


def test_an_explicit_choice_is_not_compared(monkeypatch):
    kernels = _Kernels(monkeypatch)
    for backend in ("triton", "torch"):
        reduce = BackendChoice(SETTINGS, PACKING, backend, pytest.fail)
        assert [_reduce(reduce, _call(seed))[1] for seed in range(2)] == [backend] * 2
    assert kernels.calls == ["triton", "triton", "torch", "torch"]


def test_what_counts_as_disagreement():
    call = _call()
    matrix = measure(call, SETTINGS, make_plan(call, SETTINGS), PACKING, "torch").numpy()
    assert disagreement(PACKING, matrix, matrix.copy()) is None
    rounded = matrix.copy()
    rounded[[name in METRICS for name in PACKING.columns]] *= 1.0 + 1e-6
    assert disagreement(PACKING, rounded, matrix) is None
    for column, change in ((0, 1.0), (1, 1.0), (PACKING.num_sums, 0.1)):
        other = matrix.copy()
        other[column] += change
        assert disagreement(PACKING, other, matrix) is not None
    nothing = np.full_like(matrix, np.nan)
    assert disagreement(PACKING, nothing, nothing) is None
    assert disagreement(PACKING, nothing, matrix) is not None


def test_the_coverage_report_says_which_backend_was_taken():
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with attnmon.watch(model) as monitor:
        assert [record.backend for record in monitor.coverage()] == [""]
        with monitor.step():
            x = torch.randn(2, 6, 8)
            model(x, x, x)
        assert [record.backend for record in monitor.coverage()] == ["torch"]
