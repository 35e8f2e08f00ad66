"""What the paper says of each experiment, beside what was measured here, with a verdict.

Verdicts are those of the audit of all statements (``attnmon.theory.audit``, docs/audit.md): "true" (a theorem, and it
holds on every row measured here), "empirical" (an observation on one model and one text; yours may differ), "false as
printed" (a counterexample exists; the corrected statement stands beside it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnmon.paper.store import Record
from attnmon.paper.summary import critical_points, curve, fit_line, total
from attnmon.theory.audit import STATEMENTS, TRUE


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, beside what was measured.

    Attributes:
        experiment: which experiment shows it.
        statement: in our words.
        paper: the paper's figure or expression.
        measured: what this model and text gave.
        audited: name of the statement in ``attnmon.theory.audit``, "" for a statement of ours that is true.
        note: why the verdict is as it is, and what holds instead.

    Source: paper, experiments 1 to 5; the verdicts are ours (docs/audit.md).
    """

    experiment: str
    statement: str
    paper: str
    measured: str
    audited: str
    note: str

    @property
    def verdict(self) -> str:
        """The verdict of the audit."""
        return next((one.verdict for one in STATEMENTS if one.name == self.audited), TRUE)


def claims(merged: Mapping[str, Sequence[Record]], tests: Sequence[Record]) -> list[Claim]:
    """Set the paper's claims beside the measurements of those experiments that were run.

    Args:
        merged: experiment -> records merged over chunks.
        tests: ``summary.separation_tests`` of experiment 3.

    Returns:
        The claims in the order of the experiments.

    Source: paper, experiments 1 to 5; the verdicts are ours (docs/audit.md).
    """
    found: list[Claim] = []
    for experiment, make in (
        ("distance-length", _over_length),
        ("distance-topn", _over_top_n),
        ("separability", _separability),
        ("sensitivity", _sensitivity),
    ):
        if merged.get(experiment):
            found += make(merged[experiment])
    if tests:
        place = sum(claim.experiment in ("distance-length", "distance-topn") for claim in found)
        found[place:place] = [_critical(tests)]
    return found


def _over_length(records: Sequence[Record]) -> list[Claim]:
    top_n = records[0]["top_n"]
    distance, expected = curve(records, "length", "distance"), curve(records, "length", "expected")
    line = fit_line(distance.x, distance.mean)
    straight = "one length only" if line is None else f"slope {line.slope:.3g} a token, R^2 = {line.r_squared:.3f}"
    if line is not None and len(distance.x) == 2:
        straight = f"slope {line.slope:.3g} a token (two lengths: no test of a straight line)"
    limit = curve(records, "length", "expected_limit").mean
    shown = _lengths(expected.x, expected.mean)
    return [
        Claim(
            "distance-length",
            f"The distance of the N = {top_n} largest weights grows linearly with L",
            "linear in L at N = 5",
            straight,
            "true distance grows linearly",
            "It can grow, about as (n - N)|s|, where |s| does not fall with n; it need not.",
        ),
        Claim(
            "distance-length",
            "The expected distance of a random set grows linearly with L",
            "linear",
            f"E = {shown}; never above {limit[-1]:.3g}",
            "expected distance grows linearly",
            "Always E <= (n - N)/n (N + 1) max|x|, which does not grow with n.",
        ),
        _bound_claim("distance-length", records),
    ]


def _over_top_n(records: Sequence[Record]) -> list[Claim]:
    distance, expected = curve(records, "top_n", "distance").mean, curve(records, "top_n", "expected")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = distance / expected.mean
    shown = ", ".join(f"{value:.2f} at N = {n:g}" for n, value in zip(expected.x, ratio, strict=True))
    return [
        Claim(
            "distance-topn",
            "The distances of the N largest weights and of N random keys meet near N = 100",
            "equal near N = 100 (L = 1024)",
            f"true / expected: {shown}",
            "true and expected distance meet",
            f"Seen on GPT-2; here at L = {records[0]['length']}. Nothing makes them meet at a given N.",
        ),
        _bound_claim("distance-topn", records),
    ]


def _bound_claim(experiment: str, records: Sequence[Record]) -> Claim:
    rows, over = total(records, "rows"), total(records, "bound_violation_count")
    return Claim(
        experiment,
        "Theorem 1: an upper bound of the distance",
        "an upper bound",
        f"{over:,} of {rows:,} rows above it",
        "distance bound, top-N sets",
        "True of the N largest weights; false of arbitrary sets of N keys.",
    )


def _critical(tests: Sequence[Record]) -> Claim:
    x, y, none_at = critical_points(tests)
    line = fit_line(x, y)
    shown = ", ".join(f"{n:g} at L = {length:g}" for length, n in zip(x, y, strict=True)) or "none found"
    fitted = "" if line is None else f"; fitted slope {line.slope:.3f} (through the origin {line.through_origin:.3f})"
    none = "" if not none_at else f"; none up to L/2 at L = {', '.join(map(str, none_at))}"
    heads = tests[0]["heads"]
    return Claim(
        "critical-n",
        "The first N whose distances a KS test cannot tell from random sets' is a fixed share of L",
        "about 0.06 L, said of any model",
        shown + fitted + none,
        "critical N",
        f"An observation on GPT-2, no law: the test compares {heads} heads with {heads}, so the N found depends on the "
        "number of heads and on the level as well as on the model.",
    )


def _separability(records: Sequence[Record]) -> list[Claim]:
    found = curve(records, "top_n", "separability")
    medians = np.nanmedian(found.heads, axis=1)
    beyond = medians[found.x >= 16]
    plateau = (
        f"medians over heads at N >= 16: {beyond.min():.2f} to {beyond.max():.2f}" if len(beyond) else "no N >= 16"
    )
    shown = ", ".join(f"{value:.2f} at N = {n:g}" for n, value in zip(found.x, medians, strict=True))
    rows = total(records, "rows")
    lower, above = total(records, "lower_violation_count"), total(records, "paper_violation_count")
    least = np.nanmin([record["paper_expression_least"] for record in records])
    return [
        Claim(
            "separability",
            "N_s/N falls until N is about 16, then stays at 0.70 to 0.85",
            "0.70 to 0.85 for N >= 16",
            f"{plateau} ({shown})",
            "plateau of separability",
            "GPT-2 on War and Peace. Synthetic data gave 0.48 to 0.97 at N = 16. No quality score: watch its change.",
        ),
        Claim(
            "separability",
            "Theorem 2, lower bound of N_s/N",
            "a lower bound",
            f"{lower:,} of {rows:,} rows below it",
            "separability, lower bound",
            "True, with a strict <; negative, and then empty, for many rows.",
        ),
        Claim(
            "separability",
            "Theorem 2, upper expression (1/N) sum exp(-(r - xi)^2 / (16 M^2)) of N_s/N",
            "called an upper bound",
            f"{above:,} of {rows:,} rows above it; its least value was {least:.3f}",
            "separability, upper expression",
            "Not a bound: rows exceed it. Drawn for comparison only.",
        ),
        Claim(
            "separability",
            "A theorem: at most 80 % of the selected keys can be told apart",
            "at most 80 %",
            f"largest head with N > 1: {_largest(found.heads[found.x > 1])}",
            "at most 80 % separated",
            "With the paper's radius its expression is never below 0.939; N = 1 always gives 1.",
        ),
    ]


def _sensitivity(records: Sequence[Record]) -> list[Claim]:
    epsilons = sorted({record["epsilon"] for record in records})
    rows = total(records, "rows")
    over, over_expression = total(records, "bound_violation_count"), total(records, "g_over_paper_count")
    first = [record for record in records if record["epsilon"] == epsilons[0]]
    spectral, over_paper = total(first, "rows"), total(first, "jacobian_over_paper_count")
    g = curve(first, "temperature", "g")
    largest = np.nanmax(g.heads, axis=1)
    low = g.x < 0.1
    slope = math.nan
    if low.sum() >= 2 and (largest[low] > 0).all():
        slope = float(np.polyfit(np.log10(g.x[low]), np.log10(largest[low]), 1)[0])
    high = largest[g.x >= 1.0]
    drop = ""
    if low.any() and len(high) and high[0] > 0:
        at_low = largest[low][-1]
        drop = f"; T = {g.x[low][-1]:.2g} to T = 1: {math.log10(at_low / high[0]):.1f} orders lower"
    return [
        Claim(
            "sensitivity",
            "g(T, eps) follows 1/T below T = 0.1 and is about two orders lower at T >= 1",
            "slope -1 on log-log axes; two orders",
            f"eps = {epsilons[0]:g}, largest head: slope {slope:.2f} below T = 0.1{drop}",
            "g follows 1/T",
            "Holds near ties only: two logits a gap g apart are worst (0.448/g) at T = 0.648 g and freeze below.",
        ),
        Claim(
            "sensitivity",
            "The softmax Jacobian's spectral norm is at most min(1/(4T), sqrt 2)",
            "called a bound",
            f"{over_paper:,} of {spectral:,} rows and temperatures above it",
            "Jacobian, spectral norm",
            "1/(4T) bounds the largest entry; the spectral norm is bounded by 1/(2T).",
        ),
        Claim(
            "sensitivity",
            "The finite difference g(T, eps) is at most min(1/(4T), sqrt 2)",
            "called a bound",
            f"{over_expression:,} of {rows:,} rows, temperatures and steps above it",
            "finite difference",
            "A random direction sees |J|_F / sqrt(n), so long rows stay below it; short ones and ties do not.",
        ),
        Claim(
            "sensitivity",
            "Ours: g(T, eps) is at most min(1/(2T), sqrt(2)/eps)",
            "-",
            f"{over:,} of {rows:,} rows, temperatures and steps above it",
            "",
            "sqrt(2) is the diameter of the simplex, so it bounds a finite step. It is why the curves of eps part.",
        ),
    ]


def _largest(heads: np.ndarray) -> str:
    return f"{np.nanmax(heads):.2f}" if heads.size else "none asked"


def _lengths(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    ends = sorted({0, len(x) // 2, len(x) - 1})
    return ", ".join(f"{y[i]:.3g} at L = {x[i]:g}" for i in ends)
