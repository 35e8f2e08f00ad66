"""The rows of one head -> the records of each experiment (the paper's Algorithms 1 to 5, and other normalisers).

A row counts where it sees more than N keys; a head's number is the mean over those rows. Everything said of one row
comes from ``attnmon.theory``; here it is only averaged and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from attnmon.errors import AttnmonError
from attnmon.theory.expectation import expected_distance_limit
from attnmon.theory.head import HeadGeometry, head_geometry
from attnmon.theory.jacobian import (
    finite_difference,
    finite_difference_bound,
    paper_expression,
    row_directions,
    spectral_norm,
)
from attnmon.theory.normalizers import compare
from attnmon.theory.paper.capture import Head
from attnmon.theory.paper.options import EPSILONS, TEMPERATURES, Options, candidates
from attnmon.theory.paper.store import Record
from attnmon.theory.paper.sweep import expected_distances, nested_distances, weight_ranks

_SLACK = 1e-5  # relative, of float32 arithmetic: nearer a bound than this is not across it
_BLOCK = 128  # rows at a time, so that they stay in the cache
_COMPARED_ROWS = 64  # of a head, where other normalisers are solved row by row


@dataclass(frozen=True, slots=True)
class Place:
    """Where a head's rows stand: the unit, and the seed of what is drawn for it."""

    length: int
    chunk: int
    seed: int


class HeadRows:
    """A head with what several experiments need of it, computed once.

    Args:
        head: its rows.
        place: of the unit.

    Raises:
        AttnmonError: a logit or a vector is not finite.
    """

    def __init__(self, head: Head, place: Place) -> None:
        self.head, self.place = head, place
        z = head.logits.masked_fill(~head.visible, -torch.inf)
        outcomes = z if head.sink is None else torch.nn.functional.pad(z, (0, 1), value=head.sink)
        everything = torch.softmax(outcomes, -1)
        self.weights = everything[:, : z.shape[1]]
        self.sink_weight = None if head.sink is None else everything[:, -1]
        if not (bool(everything.isfinite().all()) and bool(head.tokens.isfinite().all())):
            raise AttnmonError(
                f"{head.module or 'the model'}, head {head.head}: a logit or a vector is not finite; "
                "the experiments need a model whose forward is sound"
            )
        self.count = head.visible.sum(-1)

    @cached_property
    def ranks(self) -> Tensor:
        """Rank of each key by its weight."""
        return weight_ranks(self.weights, self.head.visible)

    def expected(self, sizes: Sequence[int], draws: int) -> tuple[Tensor, Tensor]:
        """Monte Carlo estimate of E[d~] and its squared standard error, [sizes, R]."""
        head = self.head
        return expected_distances(self.weights, head.tokens, head.visible, sizes, draws, self.place.seed)

    def record(self, experiment: str, **values: float | int | str) -> Record:
        """A tidy row: where, then what."""
        head, place = self.head, self.place
        return {
            "experiment": experiment,
            "length": place.length,
            "chunk": place.chunk,
            "layer": head.layer,
            "module": head.module,
            "head": head.head,
            **values,
        }


def measure_head(head: Head, experiments: Sequence[str], options: Options, place: Place) -> dict[str, list[Record]]:
    """Records of the wanted experiments of one head on one chunk at one length."""
    rows = HeadRows(head, place)
    return {name: _EXPERIMENTS[name](rows, options) for name in experiments}


def _over_length(rows: HeadRows, options: Options) -> list[Record]:
    return _distances(rows, "distance-length", (options.length_top_n,), options.draws)


def _over_top_n(rows: HeadRows, options: Options) -> list[Record]:
    return _distances(rows, "distance-topn", options.top_n, options.draws)


def _distances(rows: HeadRows, experiment: str, sizes: Sequence[int], draws: int) -> list[Record]:
    """Experiments 1 and 2: d~, its bound and its expectation."""
    head = rows.head
    expected, variance = rows.expected(sizes, draws)
    found = []
    for index, one in enumerate(head_geometry(rows.weights, head.tokens, sizes, head.visible)):
        valid = rows.count > one.top_n
        assert one.bound is not None
        limit = expected_distance_limit(head.tokens, one.top_n, head.visible)
        found.append(
            rows.record(
                experiment,
                top_n=one.top_n,
                rows=int(valid.sum()),
                distance=_mean(one.distance, valid),
                bound=_mean(one.bound, valid),
                expected=_mean(expected[index], valid),
                expected_se=_error(variance[index], valid),
                expected_main_term=_mean(one.expected, valid),
                expected_residual_bound=_mean(one.residual, valid),
                expected_limit=_mean(limit, valid),
                bound_violation_count=_above(one.distance, one.bound, valid),
            )
        )
    return found


def _critical(rows: HeadRows, options: Options) -> list[Record]:
    """Experiment 3: d~ and E[d~] for a whole list of N."""
    sizes = candidates(rows.place.length)
    distance = nested_distances(rows.weights, rows.head.tokens, rows.ranks, sizes)
    expected, variance = rows.expected(sizes, options.draws)
    found = []
    for index, top_n in enumerate(sizes):
        valid = rows.count > top_n
        found.append(
            rows.record(
                "critical-n",
                top_n=top_n,
                rows=int(valid.sum()),
                distance=_mean(distance[index], valid),
                expected=_mean(expected[index], valid),
                expected_se=_error(variance[index], valid),
            )
        )
    return found


def _separability(rows: HeadRows, options: Options) -> list[Record]:
    """Experiment 4: N_s / N, the lower bound, and the paper's expression, which is not a bound."""
    geometry = head_geometry(rows.weights, rows.head.tokens, options.top_n, rows.head.visible, bound=False)
    return [_separation(rows, one) for one in geometry]


def _separation(rows: HeadRows, one: HeadGeometry) -> Record:
    valid, measured = rows.count > one.top_n, one.separation
    bounded = valid & measured.lower_bound.isfinite()  # -inf where the radius is 0: nothing is claimed
    bounded_xi = valid & measured.lower_bound_xi.isfinite()
    return rows.record(
        "separability",
        top_n=one.top_n,
        rows=int(valid.sum()),
        separability=_mean(measured.fraction, valid),
        # a bound below 0 says no more than 0 does, and averages of it would say less
        lower_bound=_mean(measured.lower_bound.clamp(min=0.0), valid),
        lower_bound_xi=_mean(measured.lower_bound_xi.clamp(min=0.0), valid),
        paper_expression=_mean(measured.paper_expression, valid),
        paper_expression_least=_least(measured.paper_expression, valid),
        precision=_mean(measured.precision, valid),
        recall=_mean(measured.recall, valid),
        f_score=_mean(measured.f_score, valid),
        margin=_mean(measured.margin, valid),
        retained_mass=_mean(measured.retained_mass, valid),
        lower_violation_count=_above(measured.lower_bound, measured.fraction, bounded)
        + _above(measured.lower_bound_xi, measured.fraction, bounded_xi),
        empty_lower_bound_count=int((valid & (measured.lower_bound <= 0.0)).sum()),
        paper_violation_count=_above(measured.fraction, measured.paper_expression, valid),
    )


def _sensitivity(rows: HeadRows, options: Options) -> list[Record]:
    """Experiment 5: g(T, eps) and the exact spectral norm at each temperature."""
    head = rows.head
    length = head.logits.shape[0]
    directions = _directions(length, head.logits.device)
    standard = head.logits * head.tau  # l, whatever the model's own temperature
    valid = rows.count >= 1
    g = torch.zeros(len(TEMPERATURES), len(EPSILONS), length, device=standard.device)
    norm = torch.zeros(len(TEMPERATURES), length, device=standard.device)
    for first in range(0, length, _BLOCK):
        block, reach = slice(first, min(first + _BLOCK, length)), min(first + _BLOCK, length)
        logits, visible = standard[block, :reach], head.visible[block, :reach]
        for t, temperature in enumerate(TEMPERATURES):
            weights = torch.softmax((logits / temperature).masked_fill_(~visible, -torch.inf), -1)
            norm[t, block] = spectral_norm(weights, temperature)
            for e, epsilon in enumerate(EPSILONS):
                g[t, e, block] = finite_difference(logits, directions[block, :reach], temperature, epsilon, visible)
    found = []
    for t, temperature in enumerate(TEMPERATURES):
        over_paper = _above(norm[t], torch.full_like(norm[t], paper_expression(temperature)), valid)
        for e, epsilon in enumerate(EPSILONS):
            bound = finite_difference_bound(temperature, epsilon)
            found.append(
                rows.record(
                    "sensitivity",
                    temperature=temperature,
                    epsilon=epsilon,
                    rows=int(valid.sum()),
                    g=_mean(g[t, e], valid),
                    g_max=float(g[t, e][valid].max()),
                    bound=bound,
                    bound_violation_count=_above(g[t, e], torch.full_like(g[t, e], bound), valid),
                    jacobian=_mean(norm[t], valid),
                    jacobian_max=float(norm[t][valid].max()),
                    jacobian_over_paper_count=over_paper,
                )
            )
    return found


def _normalizers(rows: HeadRows, options: Options) -> list[Record]:
    """Other normalisers on the same logits, for rows spread evenly over those with at least two keys."""
    head = rows.head
    length = head.logits.shape[0]
    at = torch.linspace(1, length - 1, min(_COMPARED_ROWS, length - 1)).round().long()
    found: dict[str, Record] = {}
    for one in compare(head.logits[at] * head.tau, visible=head.visible[at]):
        name = one["normalizer"]
        record = found.setdefault(
            name,
            rows.record(
                "normalizers",
                normaliser=name,
                sums_to_one=int(one["sums_to_one"]),
                entropy_of=one["entropy_of"],
                rows=len(at),
            ),
        )
        record[one["metric"]] = one["value"]
        record["rows"] = min(record["rows"], one["rows"])
    return list(found.values())


@lru_cache(maxsize=2)
def _directions(length: int, device: torch.device) -> Tensor:
    """Those of the live metric ``jacobian_fd``."""
    return row_directions(torch.arange(length, device=device), length)


def _mean(values: Tensor, valid: Tensor) -> float:
    return float(values[valid].double().mean()) if bool(valid.any()) else float("nan")


def _least(values: Tensor, valid: Tensor) -> float:
    return float(values[valid].min()) if bool(valid.any()) else float("nan")


def _error(variance: Tensor, valid: Tensor) -> float:
    """Standard error of a mean over rows that are drawn independently."""
    return float(variance[valid].sum().sqrt() / valid.sum()) if bool(valid.any()) else float("nan")


def _above(values: Tensor, bounds: Tensor, valid: Tensor) -> int:
    """Rows whose value lies above its bound by more than rounding."""
    return int((valid & (values > bounds + _SLACK * bounds.abs() + 1e-7)).sum())


_EXPERIMENTS: dict[str, Callable[[HeadRows, Options], list[Record]]] = {
    "distance-length": _over_length,
    "distance-topn": _over_top_n,
    "critical-n": _critical,
    "separability": _separability,
    "sensitivity": _sensitivity,
    "normalizers": _normalizers,
}
