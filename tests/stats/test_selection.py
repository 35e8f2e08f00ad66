"""The K largest entries against a stable sort."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from attnmon.stats.streaming import top_keys as selection
from attnmon.stats.streaming.top_keys import largest

FLOOR = -1e29


def _rows(kind, length, generator):
    values = torch.randn(2, 3, 4, length, generator=generator)
    if kind == "tied":
        return torch.randint(0, 3, values.shape, generator=generator).float()
    if kind == "equal":
        return torch.zeros_like(values)
    if kind == "bf16":
        return values.bfloat16().float()
    if kind == "masked":  # many at the level of masked keys
        return values.masked_fill(torch.rand(values.shape, generator=generator) < 0.6, -1e30)
    return values


def _check(values, count, tie_rank):
    top, index = largest(values, count, tie_rank, FLOOR)
    ordered, stable = values.sort(dim=-1, descending=True, stable=True)
    assert index.dtype == torch.int64
    assert torch.equal(top, ordered[..., :count])  # values in descending order, whatever the indices
    assert torch.equal(values.gather(-1, index), top)
    assert bool((index.sort(-1).values.diff(dim=-1) > 0).all())  # distinct
    # the first tie_rank are the stable sort's set, wherever what is selected is no masked key
    live = (ordered[..., tie_rank - 1] > FLOOR)[..., None]
    chosen, expected = (indices[..., :tie_rank].sort(-1).values for indices in (index, stable))
    assert bool(((chosen == expected) | ~live).all())


@pytest.mark.parametrize("kind", ["random", "tied", "equal", "bf16", "masked"])
def test_every_length_against_a_stable_sort(kind):
    generator = torch.Generator().manual_seed(0)
    for length in range(1, 201):
        values = _rows(kind, length, generator)
        for top_n in (1, 4, 16):
            count = min(length, max(5, top_n + 1))
            _check(values, count, min(top_n, count))


@pytest.mark.parametrize("kind", ["random", "tied", "bf16", "masked"])
@pytest.mark.parametrize("length", [264, 271, 272, 280, 1024, 4096, 4099])
def test_long_rows_by_chunks(kind, length):
    _check(_rows(kind, length, torch.Generator().manual_seed(length)), 17, 16)


def test_the_chunked_search_is_the_one_that_runs(monkeypatch):
    """Where chunks pay and fit, ``topk`` never sees a whole row."""
    lengths = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, *a, **k: lengths.append(x.shape[-1]) or topk(x, *a, **k))
    for length, whole in ((272, False), (273, True), (128, True), (4096, False), (2050, True)):
        lengths.clear()
        largest(torch.randn(1, length), 17, 16, FLOOR)
        assert (length in lengths) == whole == (selection.chunk_size(length, 17) == 1)


def test_all_in_one_chunk_and_one_in_each():
    for count in (2, 8, 20):
        length = 512
        chunk = selection.chunk_size(length, count)
        assert chunk > 1
        chunks = length // chunk
        values = torch.zeros(2, length)
        values[0, 3::chunks] = torch.arange(1.0, chunk + 1)  # chunk 3 alone
        values[1, :chunks] = torch.arange(1.0, chunks + 1)  # the first key of each
        _check(values, count, count - 1)


def test_infinities():
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    values[0, 5], values[1, 7:30] = math.inf, -math.inf
    _check(values, 6, 5)


def test_devices_that_sort_answer_the_same():
    generator = torch.Generator().manual_seed(1)
    for kind in ("random", "tied", "bf16"):
        values = _rows(kind, 300, generator)
        elsewhere = SimpleNamespace(device=SimpleNamespace(type="cuda"), sort=values.sort)
        there, here = largest(elsewhere, 17, 16, FLOOR), largest(values, 17, 16, FLOOR)
        assert torch.equal(there[0], here[0])
        assert torch.equal(there[1][..., :16].sort(-1).values, here[1][..., :16].sort(-1).values)
