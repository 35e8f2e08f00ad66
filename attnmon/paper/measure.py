"""The rows of one head -> the records of each experiment (the paper's Algorithms 1 to 5, and other normalizers).

A row counts where it sees more than N keys; a head's number is the mean over those rows. Everything said of one row
comes from ``attnmon.theory``; here it is only averaged and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from attnmon.paper.capture import Head, check_finite
from attnmon.paper.options import EPSILONS, TEMPERATURES, PaperOptions, candidates
from attnmon.paper.store import Record
from attnmon.paper.sweep import expected_distances, nested_distances, weight_ranks
from attnmon.paper.temperatures import sensitivities
from attnmon.theory.expectation import expected_distance_limit
from attnmon.theory.head import HeadGeometry, head_geometry
from attnmon.theory.jacobian import (
    finite_difference_bound,
    paper_expression,
    row_directions,
)
from attnmon.theory.normalizers import compare

_SLACK = 1e-5  # relative, of float32 arithmetic: nearer a bound than this is not across it
_COMPARED_ROWS = 64  # of a head, where other normalizers are solved row by row


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The piece of text that a head was computed on, and the seed of what is drawn for the head.

    Attributes:
        length: L, the number of tokens read from the start of the chunk.
        chunk: number of the chunk, from 0.
        seed: of the head's random sets.

    Source: ours; the paper reads consecutive pieces of one text.
    """

    length: int
    chunk: int
    seed: int


class HeadRows:
    """A head with everything that several experiments need of it, computed once.

    Args:
        head: its rows.
        excerpt: what the head was computed on.
        experiments: those that will be asked for.
        options: N, draws and vectors.

    Attributes:
        head: its rows.
        excerpt: what the head was computed on.
        weights: float32 [L, L], p; 0 at hidden keys.
        count: int64 [L], n, the number of visible keys.

    Raises:
        AttnmonError: a logit or a vector is not finite.

    Source: paper, Algorithms 1 to 4.
    """

    def __init__(self, head: Head, excerpt: Excerpt, experiments: Sequence[str], options: PaperOptions) -> None:
        self.head, self.excerpt = head, excerpt
        self._experiments, self._options = experiments, options
        check_finite(head)
        z = head.logits.masked_fill(~head.visible, -torch.inf)
        outcomes = z if head.sink is None else torch.nn.functional.pad(z, (0, 1), value=head.sink)
        self.weights = torch.softmax(outcomes, -1)[:, : z.shape[1]]
        self.count = head.visible.sum(-1)

    def sizes(self, *experiments: str) -> tuple[int, ...]:
        """List, ascending, the N of those of the given experiments that are wanted."""
        options, found = self._options, set()
        for name in set(experiments) & set(self._experiments):
            found |= set(_sizes(name, options, self.excerpt.length))
        return tuple(sorted(found))

    @cached_property
    def geometry(self) -> dict[int, HeadGeometry]:
        """N -> distance, bound and separability of the N largest weights, for experiments 1, 2 and 4."""
        sizes = self.sizes("distance-length", "distance-topn", "separability")
        with_bound = bool(self.sizes("distance-length", "distance-topn"))
        found = head_geometry(self.weights, self.head.tokens, sizes, self.head.visible, bound=with_bound)
        return dict(zip(sizes, found, strict=True))

    @cached_property
    def distances(self) -> dict[int, Tensor]:
        """N -> d~ of the N largest weights, float64 [R], for experiment 3."""
        sizes = self.sizes("critical-n")
        ranks = weight_ranks(self.weights, self.head.visible)
        return dict(zip(sizes, nested_distances(self.weights, self.head.tokens, ranks, sizes), strict=True))

    @cached_property
    def expected(self) -> dict[int, tuple[Tensor, Tensor]]:
        """N -> Monte Carlo estimate of E[d~] and its squared standard error, [R] each, for experiments 1, 2 and 3."""
        head, sizes = self.head, self.sizes("distance-length", "distance-topn", "critical-n")
        draws, seed = self._options.draws, self.excerpt.seed
        means, variances = expected_distances(self.weights, head.tokens, head.visible, sizes, draws, seed)
        return {size: (means[index], variances[index]) for index, size in enumerate(sizes)}

    def record(self, experiment: str, **values: float | int | str) -> Record:
        """Make a row of a tidy table: experiment, excerpt and head, then ``values``."""
        head, excerpt = self.head, self.excerpt
        return {
            "experiment": experiment,
            "length": excerpt.length,
            "chunk": excerpt.chunk,
            "layer": head.layer,
            "module": head.module,
            "head": head.head,
            **values,
        }


def measure_head(
    head: Head, experiments: Sequence[str], options: PaperOptions, excerpt: Excerpt
) -> dict[str, list[Record]]:
    """Measure one head on one excerpt.

    Args:
        head: its rows.
        experiments: names of ``EXPERIMENTS``.
        options: N, draws and vectors.
        excerpt: what the head was computed on.

    Returns:
        experiment -> its records; means over the rows that see more than N keys.

    Raises:
        AttnmonError: a logit or a vector is not finite.

    Source: paper, Algorithms 1 to 5; "normalizers" is ours.
    """
    rows = HeadRows(head, excerpt, experiments, options)
    return {name: _EXPERIMENTS[name](rows, _sizes(name, options, excerpt.length)) for name in experiments}


def _sizes(experiment: str, options: PaperOptions, length: int) -> tuple[int, ...]:
    """List the N of an experiment."""
    if experiment == "distance-length":
        return (options.length_top_n,)
    return candidates(length) if experiment == "critical-n" else options.top_n


def _over_length(rows: HeadRows, sizes: Sequence[int]) -> list[Record]:
    return [_distance(rows, "distance-length", size) for size in sizes]


def _over_top_n(rows: HeadRows, sizes: Sequence[int]) -> list[Record]:
    return [_distance(rows, "distance-topn", size) for size in sizes]


def _distance(rows: HeadRows, experiment: str, top_n: int) -> Record:
    """Measure d~, its bound and its expectation, for experiments 1 and 2."""
    one, (expected, variance) = rows.geometry[top_n], rows.expected[top_n]
    assert one.bound is not None
    valid = rows.count > top_n
    limit = expected_distance_limit(rows.head.tokens, top_n, rows.head.visible)
    return rows.record(
        experiment,
        top_n=top_n,
        rows=int(valid.sum()),
        distance=_mean(one.distance, valid),
        bound=_mean(one.bound, valid),
        expected=_mean(expected, valid),
        expected_se=_error(variance, valid),
        expected_main_term=_mean(one.expected, valid),
        expected_residual_bound=_mean(one.residual, valid),
        expected_limit=_mean(limit, valid),
        bound_violation_count=_above(one.distance, one.bound, valid),
    )


def _critical(rows: HeadRows, sizes: Sequence[int]) -> list[Record]:
    """Measure d~ and E[d~] for a whole list of N, for experiment 3."""
    found = []
    for top_n in sizes:
        valid = rows.count > top_n
        expected, variance = rows.expected[top_n]
        found.append(
            rows.record(
                "critical-n",
                top_n=top_n,
                rows=int(valid.sum()),
                distance=_mean(rows.distances[top_n], valid),
                expected=_mean(expected, valid),
                expected_se=_error(variance, valid),
            )
        )
    return found


def _separability(rows: HeadRows, sizes: Sequence[int]) -> list[Record]:
    """Measure N_s / N, the lower bound, and the paper's expression, which is not a bound, for experiment 4."""
    return [_separation(rows, rows.geometry[size]) for size in sizes]


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


def _sensitivity(rows: HeadRows, sizes: Sequence[int]) -> list[Record]:
    """Measure g(T, eps) and the exact spectral norm at each temperature, for experiment 5."""
    head = rows.head
    length = head.logits.shape[0]
    directions = _directions(length, head.logits.device)
    standard = head.logits * head.tau  # l, whatever the model's own temperature
    valid = rows.count >= 1
    g, norm = sensitivities(standard, directions, head.visible, TEMPERATURES, EPSILONS)
    found = []
    for t, temperature in enumerate(TEMPERATURES):
        expression = torch.full_like(norm[t], paper_expression(temperature))
        over_paper = _above(norm[t], expression, valid)
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
                    g_over_paper_count=_above(g[t, e], expression, valid),
                    jacobian=_mean(norm[t], valid),
                    jacobian_max=float(norm[t][valid].max()),
                    jacobian_over_paper_count=over_paper,
                )
            )
    return found


def _normalizers(rows: HeadRows, sizes: Sequence[int]) -> list[Record]:
    """Compare other normalizers on the same logits, for rows spread evenly over those with at least two keys."""
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
                normalizer=name,
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
    """Give the directions of the live metric ``jacobian_fd``, float32 [length, length]."""
    return row_directions(torch.arange(length, device=device), length)


def _mean(values: Tensor, valid: Tensor) -> float:
    return float(values[valid].double().mean()) if bool(valid.any()) else float("nan")


def _least(values: Tensor, valid: Tensor) -> float:
    return float(values[valid].min()) if bool(valid.any()) else float("nan")


def _error(variance: Tensor, valid: Tensor) -> float:
    """Compute the standard error of a mean over rows that are drawn independently."""
    return float(variance[valid].sum().sqrt() / valid.sum()) if bool(valid.any()) else float("nan")


def _above(values: Tensor, bounds: Tensor, valid: Tensor) -> int:
    """Count the rows whose value lies above its bound by more than rounding."""
    return int((valid & (values > bounds + _SLACK * bounds.abs() + 1e-7)).sum())


_EXPERIMENTS: dict[str, Callable[[HeadRows, Sequence[int]], list[Record]]] = {
    "distance-length": _over_length,
    "distance-topn": _over_top_n,
    "critical-n": _critical,
    "separability": _separability,
    "sensitivity": _sensitivity,
    "normalizers": _normalizers,
}
