"""Distances of nested sets: those of the definition, and random sets that are uniform draws."""

from itertools import combinations

import numpy as np
import pytest
import torch

from attnmon.paper.sweep import expected_distances, nested_distances, random_ranks, weight_ranks
from attnmon.theory.geometry import distance, top_n_distance

SIZES = (1, 2, 3, 7, 20, 100, 150, 299)


def head(length=150, width=16, kind="causal", spread=1.5, seed=0, ties=False):
    """weights, tokens, visible of one head."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(length, length, generator=generator) * spread
    if ties:
        z = z.round()
    x = torch.randn(length, width, generator=generator)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "window":
        visible &= torch.ones(length, length, dtype=torch.bool).triu(-20)
    return torch.softmax(z.masked_fill(~visible, -torch.inf), -1), x, visible


# longer than the block of rows
@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("spread", [0.1, 1.5, 20.0])
@pytest.mark.parametrize("ties", [False, True])
def test_the_sets_of_largest_weights(kind, spread, ties):
    weights, x, visible = head(300, kind=kind, spread=spread, ties=ties)
    found = nested_distances(weights, x, weight_ranks(weights, visible), SIZES)
    for index, size in enumerate(SIZES):
        expected = top_n_distance(weights.double(), x.double(), size, visible)
        torch.testing.assert_close(found[index], expected, rtol=2e-5, atol=2e-5)
    assert (found[:, 0] == 0).all()  # one key: nothing is outside
    assert (found[0, 1:] > 0).all()


def test_any_order_gives_the_distance_of_its_sets():
    weights, x, visible = head()
    ranks = random_ranks(visible, torch.Generator().manual_seed(1))
    found = nested_distances(weights, x, ranks, SIZES)
    for index, size in enumerate(SIZES):
        selected = (ranks >= 0) & (ranks < size)
        expected = distance(weights.double(), x.double(), selected, visible)
        torch.testing.assert_close(found[index], expected, rtol=2e-5, atol=2e-5)


def test_of_equal_weights_the_lowest_index_comes_first():
    weights = torch.tensor([[0.2, 0.3, 0.2, 0.3, 0.0]])
    visible = torch.tensor([[True, True, True, True, False]])
    assert weight_ranks(weights, visible).tolist() == [[2, 0, 3, 1, -1]]


def test_random_orders_are_permutations_of_the_visible_keys():
    _, _, visible = head(40, kind="window")
    ranks = random_ranks(visible, torch.Generator().manual_seed(0))
    for row, seen in zip(ranks, visible, strict=True):
        assert sorted(row[seen].tolist()) == list(range(int(seen.sum())))
        assert (row[~seen] == -1).all()


def test_random_sets_are_uniform():
    visible = torch.tensor([True] * 5 + [False]).expand(40_000, 6)
    ranks = random_ranks(visible, torch.Generator().manual_seed(0))
    chosen = (ranks >= 0) & (ranks < 2)
    counts = [int((chosen[:, i] & chosen[:, j]).sum()) for i, j in combinations(range(5), 2)]
    # ten sets, each of them one time in ten
    assert np.abs(np.array(counts) / 40_000 - 0.1).max() < 5 * (0.1 * 0.9 / 40_000) ** 0.5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_estimate_agrees_with_all_subsets(size):
    weights, x, visible = head(7, width=3)
    draws = 3000
    found, variance = expected_distances(weights, x, visible, (size,), draws, seed=0)
    for row in range(size, 7):
        p, seen = weights[row, : row + 1].double(), x[: row + 1].double()
        each = [
            float(distance(p, seen, torch.tensor([i in chosen for i in range(row + 1)])))
            for chosen in combinations(range(row + 1), size)
        ]
        error = float(variance[0, row]) ** 0.5
        assert error == pytest.approx(np.std(each) / draws**0.5, rel=0.1, abs=1e-7)
        assert float(found[0, row]) == pytest.approx(np.mean(each), abs=5 * error + 1e-6)
    assert (found[0, :size] == 0).all()


def test_the_estimate_depends_on_its_seed_alone():
    weights, x, visible = head(30)
    torch.manual_seed(1)
    first = expected_distances(weights, x, visible, (2, 3), 2, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = expected_distances(weights, x, visible, (2, 3), 2, seed=5)
    other = expected_distances(weights, x, visible, (2, 3), 2, seed=6)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # no global random state was used
