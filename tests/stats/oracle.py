"""What a call's statistics have to be, from ``stats/reference.py``, and how far float32 may be from them.

Rounding of the logits is the one error that no arithmetic after them can undo. It is bounded by the size of the
products that make up a logit, and carried through to each metric to first order, row by row; everything else has
to stay within the relative tolerance. Separability counts strict comparisons: it may be anything between the
counts with and without the comparisons that rounding can turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnmon.call import make_call
from attnmon.metrics import METRICS
from attnmon.stats import attention_stats, reference
from attnmon.stats.api import measure
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings
from attnmon.stats.streaming.finite_step import EXPM1_LIMIT
from attnmon.types import EXCLUSION_REASONS, AttentionCall
from tests.helpers import call_id

SETTINGS = ("metrics", "rows", "sequences", "top_n", "tokens", "fd_epsilon")
UNIT = 2.0**-24  # half an ulp of float32
LEAST = math.exp(-36.0)  # float32 arithmetic takes weights below this (relative to the row's largest) to be it


@dataclass
class Expected:
    """Of one call: metric -> [H], rows by reason -> [H], absolute allowances, and separability's limits."""

    stats: dict[str, Tensor]
    counts: dict[str, list[int]]
    allowed: dict[str, Tensor]
    separability: tuple[Tensor, Tensor]
    nearly_tied: int  # rows whose selected set depends on rounding


def expect(call: Mapping[str, Any], *, unit: float = UNIT, tie: float = 1e-6) -> Expected:
    """The reference, row by row, with the error budget of arithmetic whose logits round by ``unit``.

    Args:
        tie: relative error of a squared distance's excess below which two of them tie.
    """
    names = metrics_of(call)
    top_n, epsilon = call.get("top_n", 16), call.get("fd_epsilon", 0.1)
    tokens = call.get("tokens", "value")
    ignored = ("value", "hidden", *SETTINGS)
    given = {name: argument for name, argument in call.items() if name not in ignored}
    given.setdefault("query", None)
    given.setdefault("key", None)
    rows = reference.prepare_call(given.pop("query"), given.pop("key"), **given)
    sizes = _sizes(call, rows)
    vectors = None
    if call.get("value") is not None or tokens == "hidden":
        vectors = reference.token_vectors(call.get("value"), call.get("hidden"), tokens)
    num_heads = rows.logits.shape[1]
    stats = {name: torch.empty(num_heads) for name in names}
    allowed = {name: torch.zeros(num_heads, dtype=torch.float64) for name in names}
    counts = {reason: [0] * num_heads for reason in ("rows", *EXCLUSION_REASONS)}
    limits = torch.full((2, num_heads), math.nan, dtype=torch.float64)
    nearly_tied = 0
    for head in range(num_heads):
        measured, budgets, low, high = [], [], [], []
        sink = None if rows.sinks is None else float(rows.sinks[head])
        for b, i, keys, reason in reference.iterate_rows(rows, head):
            counts[reason or "rows"][head] += 1
            if reason is not None:
                continue
            z = rows.logits[b, head, i, keys]
            x = None if vectors is None else vectors[b, head * vectors.shape[1] // num_heads, keys]
            row = reference.row_stats(
                z,
                x,
                tau=rows.tau,
                sink=sink,
                uncapped=None if rows.uncapped is None else rows.uncapped[b, head, i, keys],
                query_position=i - int(rows.first_key[b, i]),
                key_positions=keys - int(rows.first_key[b, i]),
                top_n=top_n,
                fd_epsilon=epsilon,
            )
            measured.append(row)
            rounding = unit * sizes[b, head, i, keys]
            ambiguous = _ambiguous_selection(z, rounding, top_n)
            nearly_tied += ambiguous
            budgets.append(_budget(row, z, sink, x, rounding, top_n, epsilon, rows.tau))
            if "separability" in row:
                if ambiguous and top_n > 1:
                    low.append(0.0)
                    high.append(1.0)
                else:
                    few, many = _separability_limits(z, x, rounding, top_n, tie)
                    low.append(few)
                    high.append(many)
        for name in names:
            stats[name][head] = reference.merge_rows(name, measured)
            of = METRICS[name].of or name
            errors = [budget.get(of, 0.0) for row, budget in zip(measured, budgets, strict=True) if of in row]
            if errors:
                error = max(errors) if METRICS[name].merge == "max" else sum(errors) / len(errors)
                if METRICS[name].merge == "inverse_mean":
                    error *= float(stats[name][head].double().square())
                allowed[name][head] = error
        if low:
            limits[:, head] = torch.tensor([np.mean(low), np.mean(high)])
    return Expected(stats, counts, allowed, (limits[0], limits[1]), nearly_tied)


def _sizes(call: Mapping[str, Any], rows: reference.PreparedCall) -> np.ndarray:
    """[B, H, Lq, Lk]: the magnitude that a logit's rounding error is relative to."""
    size = np.abs(np.nan_to_num(rows.logits, posinf=0.0, neginf=0.0))
    if call.get("query") is None:
        return size
    q, k = call["query"].double().abs().nan_to_num(0.0, 0.0), call["key"].double().abs().nan_to_num(0.0, 0.0)
    scale = call.get("scale") or q.shape[3] ** -0.5
    product = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale).numpy()
    softcap = call.get("softcap")
    if softcap is not None:  # tanh flattens what comes in, and rounds what goes out
        raw, _, _, _ = reference.base_logits(call["query"], call["key"], None, None, scale, softcap)
        product = product * (1.0 - (raw / softcap) ** 2) + np.abs(raw)
    return product + size


def _budget(
    row: dict[str, float],
    z: np.ndarray,
    sink: float | None,
    x: np.ndarray | None,
    rounding: np.ndarray,
    top_n: int,
    step: float,
    tau: float,
) -> dict[str, float]:
    """First-order absolute error of each metric when logit j is off by up to ``rounding[j]``."""
    p, _, _ = reference.softmax_row(z if sink is None else np.append(z, sink))
    error = rounding if sink is None else np.append(rounding, UNIT * (0.0 if math.isinf(sink) else abs(sink)))
    outcomes = z if sink is None else np.append(z, max(sink, -1e30))
    # weight j is off by error[j] + sum p error of its own size
    relative = float(error[: z.size][p[: z.size] > 0].max(initial=0.0) + (p * error).sum())
    budget = {name: relative * row[name] for name in ("max_prob", "top_mass", "first_mass", "sink_mass")}
    budget["entropy"] = float((p * np.abs(outcomes - (p * outcomes).sum()) * error).sum())
    if "entropy_norm" in row:
        budget["entropy_norm"] = budget["entropy"] / math.log(outcomes.size)
    budget["logit_std"] = math.sqrt(float((rounding**2).mean()))
    budget["max_logit"] = budget["max_logit_uncapped"] = float(rounding.max())
    # v'Jv = sum over pairs of p_i p_j (v_i - v_j)^2 / 2, sink included: twice the relative error of a weight
    budget["jacobian"] = budget["jacobian_max"] = 2.0 * relative * row["jacobian"]
    budget["jacobian_fd"] = 2.0 * relative * row["jacobian_fd"]
    if step / tau > EXPM1_LIMIT:  # the moves round as well: to first order |p (1 - p)| <= 0.36 times 2 of their errors
        budget["jacobian_fd"] += 0.72 * 3.0 * UNIT / tau
    below = z.max() - z
    held = LEAST * float((1.0 + below)[below > 36.0].sum())  # a weight enters an entropy times its logit
    for name in budget.keys() - {"max_logit", "max_logit_uncapped", "logit_std"}:
        budget[name] += held * max(1.0, 1.0 / tau, 1.0 / math.log(2.0))
    budget["jacobian_fd"] += math.sqrt(np.finfo(np.float32).tiny) / step  # squares below that are lost
    if x is not None and z.size > top_n:
        lengths = p[: z.size] * np.linalg.norm(x, axis=1)
        inside = np.argsort(-p[: z.size], kind="stable")[:top_n]
        outside = np.delete(lengths, inside)
        budget["distance"] = relative * float(outside.sum() + outside.size * lengths[inside].sum())
        budget["distance"] += held * float(np.linalg.norm(x, axis=1).max())
        if _ambiguous_selection(z, rounding, top_n):
            budget["distance"] = 2.0 * row["distance"]
    return budget


def _ambiguous_selection(z: np.ndarray, rounding: np.ndarray, top_n: int) -> bool:
    """Whether rounding may exchange the last selected key and the first one left out. Exact ties do not count."""
    if z.size <= top_n:
        return False
    order = np.argsort(-z, kind="stable")[top_n - 1 : top_n + 1]
    gap = float(z[order[0]] - z[order[1]])
    return 0.0 < gap <= float(rounding[order].sum())


def _separability_limits(
    z: np.ndarray, x: np.ndarray, rounding: np.ndarray, top_n: int, tie: float
) -> tuple[float, float]:
    """N_s / N with every comparison that rounding can turn lost, and won."""
    if top_n == 1:
        return 1.0, 1.0
    e = np.exp(z - z.max())
    order = np.argsort(-z, kind="stable")
    inside, outside = order[:top_n], order[top_n:]
    weighted = e[:, None] * x
    s = weighted[inside].sum(0)
    excess = (weighted * (weighted - 2.0 * s)).sum(1)
    lengths = np.linalg.norm(weighted, axis=1)
    s_error = (lengths[inside] * (tie + rounding[inside])).sum()
    slack = lengths * ((tie + 2.0 * rounding) * (lengths + 2.0 * np.linalg.norm(s)) + 2.0 * s_error)
    slack += LEAST * lengths[inside].max()
    # close to s the distance itself is the better known
    gaps = np.linalg.norm(weighted - s, axis=1)
    gap_error = (tie + rounding) * lengths + s_error
    slack = np.minimum(slack, gap_error * (2.0 * gaps + gap_error))
    certain = excess[inside] + slack[inside] < (excess - slack)[outside].min()
    possible = excess[inside] - slack[inside] < (excess + slack)[outside].min()
    return float(certain.mean()), float(possible.mean())


def metrics_of(call: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that a call has the inputs for, or those it asks for."""
    asked = call.get("metrics")
    if asked is not None:
        return Settings.create(metrics=asked).metrics
    tokens = call.get("hidden" if call.get("tokens") == "hidden" else "value")
    has = {
        "": True,
        "value": tokens is not None,
        "sinks": call.get("sinks") is not None,
        "softcap": call.get("softcap") is not None and call.get("query") is not None,
    }
    return tuple(name for name in METRICS if has[METRICS[name].needs])


def as_call(call: Mapping[str, Any]) -> AttentionCall:
    """Keyword arguments as the validated call."""
    given = {name: argument for name, argument in call.items() if name not in SETTINGS}
    return make_call(given.pop("query"), given.pop("key"), given.pop("value", None), **given)


def packed(
    call: Mapping[str, Any] | AttentionCall,
    options: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    draw: int = 0,
) -> tuple[Packing, np.ndarray]:
    """The packed matrix of the training path; every row unless the options say otherwise."""
    if options is None:
        assert isinstance(call, Mapping)
        options = call
    chosen = {"rows": None, "sequences": None}
    chosen.update({name: given for name, given in options.items() if name in SETTINGS})
    if isinstance(call, Mapping):
        chosen["metrics"] = metrics_of(call)
        call = as_call(call)
    settings = Settings.create(**chosen)
    packing = Packing(settings.metrics)
    return packing, measure(call, settings, make_plan(call, settings, draw), packing, "torch", dtype=dtype).numpy()


def training_stats(
    call: Mapping[str, Any] | AttentionCall, options: Mapping[str, Any] | None = None, **how: Any
) -> dict[str, Tensor]:
    """metric -> [H] of the training path."""
    packing, matrix = packed(call, options, **how)
    return {name: torch.from_numpy(value) for name, value in packing.values(matrix).items()}


def counts_of(packing: Packing, matrix: np.ndarray) -> dict[str, list[int]]:
    """Rows and exclusions, as ``Expected.counts``."""
    excluded = packing.excluded(matrix)
    return {
        "rows": packing.rows(matrix).tolist(),
        **{reason: excluded[reason].tolist() for reason in EXCLUSION_REASONS},
    }


def assert_expected(
    actual: Mapping[str, Tensor], expected: Expected, rtol: float, context: str = "", *, exact: bool = False
) -> None:
    """Within rtol and the logits' rounding; separability between its limits; NaN exactly where expected.

    Args:
        exact: of float64 arithmetic: no allowance for the logits, and separability equals the reference's.
    """
    assert set(actual) == set(expected.stats), set(actual) ^ set(expected.stats)
    for name, reference_value in expected.stats.items():
        got, want = actual[name].double(), reference_value.double()
        assert actual[name].dtype == torch.float32
        assert torch.equal(got.isnan(), want.isnan()), f"{name}: {got.tolist()} for {want.tolist()}\n {context}"
        known = ~want.isnan()
        if name == "separability":
            low, high = (want, want) if exact else expected.separability
            assert bool(((low - 1e-6 <= got) & (got <= high + 1e-6))[known].all()), (
                f"{name}: {got.tolist()} is not within {low.tolist()} and {high.tolist()}\n {context}"
            )
            continue
        allowed = rtol * want.abs() + (1e-37 if exact else expected.allowed[name])
        wrong = known & ~((got == want) | ((got - want).abs() <= allowed))
        if wrong.any():
            head = int(wrong.int().argmax())
            raise AssertionError(
                f"{name}, head {head}: {float(got[head])!r} for {float(want[head])!r}, off by "
                f"{float((got - want).abs()[head]):.3g} where {float(allowed[head]):.3g} is allowed\n {context}"
            )


def check(call: Mapping[str, Any]) -> Expected:
    """Both arithmetics of a call, and its row counts, against the reference."""
    expected, context = expect(call), call_id(call)
    rtol = 1e-5 if call["query"].dtype == torch.float32 else 1e-4
    assert_expected(attention_stats(**call), expected, rtol, context, exact=True)
    packing, matrix = packed(call)
    training = {name: torch.from_numpy(value) for name, value in packing.values(matrix).items()}
    assert_expected(training, expected, rtol, context)
    assert counts_of(packing, matrix) == expected.counts, context
    return expected
