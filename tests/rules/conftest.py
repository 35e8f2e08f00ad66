"""Synthetic snapshots for rules: numbers in, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from attnmon.rules import Rule, RuleSet
from attnmon.types import Alert, Snapshot

PATH = "blocks.0.attn"


def make_snapshot(
    step: int,
    values: Mapping[str, Mapping[str, Sequence[float]]],
    nonfinite: Mapping[str, Sequence[int]] | None = None,
) -> Snapshot:
    """values: metric -> path -> one number per head. A NaN head has no rows; nonfinite: path -> counts."""
    nonfinite = nonfinite or {}
    heads: dict[str, np.ndarray] = {}
    for by_path in (*values.values(), nonfinite):
        for path, numbers in by_path.items():
            heads.setdefault(path, np.array(numbers, dtype=np.float64))
    excluded = {path: np.array(nonfinite.get(path, np.zeros(len(first))), np.int64) for path, first in heads.items()}
    return Snapshot(
        step=step,
        modules=tuple(heads),
        values={
            metric: {path: np.array(numbers, dtype=np.float32) for path, numbers in by_path.items()}
            for metric, by_path in values.items()
        },
        rows={path: np.where(np.isnan(first), 0, 128).astype(np.int64) for path, first in heads.items()},
        excluded=excluded,
        excluded_by_reason={"nonfinite": excluded},
    )


def play_series(rules: RuleSet | Rule, metric: str, series: Iterable[Any], first_step: int = 0) -> list[Alert]:
    """Feed one metric of one module; series: per step a number, or one number per head. All alerts raised."""
    rule_set = RuleSet([rules]) if isinstance(rules, Rule) else rules
    alerts: list[Alert] = []
    for step, heads in enumerate(series, first_step):
        alerts += rule_set.update(make_snapshot(step, {metric: {PATH: np.atleast_1d(heads)}}))
    return alerts


@pytest.fixture
def snapshot() -> Callable[..., Snapshot]:
    return make_snapshot


@pytest.fixture
def play() -> Callable[..., list[Alert]]:
    return play_series


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260801)
