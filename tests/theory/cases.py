"""Rows of every kind for the tests of the theory, and what each statement says of one row, written out in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import torch

from attnmon.stats.reference import softmax_row
from tests.helpers import row_logits, split

SLACK = 1 + 1e-9  # float64 rounding
KINDS = ("random", "sharp", "tied", "one_hot", "uniform", "padded", "same_vectors", "raw_vectors")


@dataclass(frozen=True)
class Row:
    """Logits and vectors of all keys, and which of them are visible."""

    kind: str
    z: np.ndarray
    x: np.ndarray
    visible: np.ndarray

    @property
    def p(self):
        """Weights of the visible keys."""
        return softmax_row(self.z[self.visible])[0]

    @property
    def seen(self):
        """Vectors of the visible keys."""
        return self.x[self.visible]

    def tensors(self, dtype=torch.float64):
        """weights with garbage at hidden keys, tokens, mask."""
        weights = np.full(self.z.size, 0.7)
        weights[self.visible] = self.p
        return torch.tensor(weights, dtype=dtype), torch.tensor(self.x, dtype=dtype), torch.tensor(self.visible)


@cache
def rows(count=400, longest=40, seed=20250817):
    rng = np.random.default_rng(seed)
    return [make_row(rng, KINDS[index % len(KINDS)], int(rng.integers(3, longest + 1))) for index in range(count)]


def make_row(rng, kind, n):
    z = row_logits(rng, kind, n)
    x = rng.normal(size=(n, int(rng.integers(2, 17)))) + rng.normal() * rng.choice([0.0, 3.0])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if kind == "same_vectors":
        x[rng.permutation(n)[: rng.integers(2, n + 1)]] = x[0]
    elif kind == "raw_vectors":
        x *= rng.uniform(0.2, 3.0, size=(n, 1))
    visible = np.ones(n, dtype=bool)
    if kind == "padded":
        visible = rng.random(n) < 0.7
        visible[rng.permutation(n)[:3]] = True
    return Row(kind, z, x, visible)


def gaps_from_selection(p, x, inside):
    y = p[:, None] * x
    return np.linalg.norm(y - y[inside].sum(0), axis=1)


def brute_distance(p, x, inside):
    outside = np.setdiff1d(np.arange(p.size), inside)
    return gaps_from_selection(p, x, inside)[outside].sum()


def brute_bound(p, x, inside, outside):
    a = p[inside].sum()
    d1 = np.linalg.norm(x[outside][:, None] - x[inside][None], axis=2).max()
    return (1 - a) * d1 + np.linalg.norm(x[inside], axis=1).max() * (a * outside.size - (1 - a))


def brute_expectation(p, x, num):
    """E[d~] over every subset; main term; bound of the residual: the formulas of the definitions, term by term."""
    n, y = p.size, p[:, None] * x
    subsets = [list(chosen) for chosen in combinations(range(n), num)]
    expected = np.mean([brute_distance(p, x, chosen) for chosen in subsets])
    m = n - 1
    main = (n - num) / n * sum(np.linalg.norm((1 + num / m) * y[i] - num / m * y.sum(0)) for i in range(n))
    spread = 0.0
    for i in range(n):
        others = np.delete(y, i, axis=0)
        variance = ((others - others.mean(0)) ** 2).sum()
        spread += np.sqrt(num * (m - num) / (m * max(m - 1, 1)) * variance)
    return expected, main, (n - num) / n * spread


def brute_separation(p, x, num):
    """Every field of ``Separation``, by the definitions."""
    inside, outside = split(p, num)
    gaps = gaps_from_selection(p, x, inside)
    near, far = gaps[inside], gaps[outside]
    r, m = far.min(), np.linalg.norm(x, axis=1).max()
    pairs = np.linalg.norm(x[:, None] - x[None], axis=2)[np.triu_indices(p.size, 1)]
    xi = []
    for i in range(num):
        q = np.delete(p[inside], i)
        xi.append(np.sqrt(m**2 * (q**2).sum() + (m**2 - pairs.min() ** 2 / 2) * (q.sum() ** 2 - (q**2).sum())))
    xi = np.array(xi)
    fraction = 1.0 if num == 1 else (near < r).mean()
    precision = num / (num + (far <= (0.0 if num == 1 else near.max())).sum())
    return {
        "fraction": fraction,
        "radius": r,
        "lower_bound": 1 - near.sum() / (r * num),
        "lower_bound_xi": 1 - xi.sum() / (r * num),
        "paper_expression": np.exp(-((r - xi) ** 2) / (16 * m**2)).mean(),
        "precision": precision,
        "recall": fraction,
        "f_score": 2 * precision * fraction / (precision + fraction),
        "margin": r - near.max(),
        "retained_mass": p[inside].sum(),
        "least_gap": min(np.abs(near - r).min(), np.abs(far - near.max()).min()),
    }


def causal_head(seed=0, length=48, width=8, sharpness=2.0):
    """weights, tokens (unit vectors), mask of a causal head, float64."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(length, length, generator=generator, dtype=torch.float64) * sharpness
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    x = torch.nn.functional.normalize(torch.randn(length, width, generator=generator, dtype=torch.float64), dim=-1)
    return torch.softmax(z.masked_fill(~mask, -torch.inf), -1), x, mask
