"""The table of metrics, which decides about tags, documentation, what is stored and how numbers merge.

In ``source``, "paper" means "Limitations of Normalization in Attention Mechanism" (arXiv 2508.17821), and "ours" means
that the definition is attnmon's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attnmon.errors import AttnmonError


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric, which is one number per head.

    Attributes:
        name: key in results, part of TensorBoard tags.
        formula: the value of one row, plain text.
        unit: "nats", "logits" or "1" (dimensionless).
        value_range: closed interval, plain text.
        merge: how rows, micro-batches and ranks merge into a head's value: "mean" (by row count), "max", or
            "inverse_mean" (1 / mean of ``of``).
        valid_rows: rows the merge runs over: "any" (n >= 1 visible keys), "pair" (n >= 2) or "selection"
            (n > top_n). A row with a logit that is not finite is never among them.
        source: where the definition comes from.
        needs: what the attention call must have: "value", "sinks", "softcap", or "" for nothing.
        of: the metric that "inverse_mean" inverts; "" for other merges.
        log_scale: whether pictures show the metric on a logarithmic scale.
    """

    name: str
    formula: str
    unit: str
    value_range: str
    merge: str
    valid_rows: str
    source: str
    needs: str = ""
    of: str = ""
    log_scale: bool = False


_TABLE = (
    Metric("entropy", "H = -sum p ln p", "nats", "[0, ln n]", "mean", "any", "paper, section 2"),
    Metric(
        "entropy_norm",
        "H / ln n; with a learned sink H / ln(n + 1)",
        "1",
        "[0, 1]",
        "mean",
        "pair",
        "entropy collapse, arXiv 2303.06296",
    ),
    Metric("max_logit", "max z over visible keys", "logits", "(-inf, inf)", "max", "any", "arXiv 2302.05442"),
    Metric(
        "max_logit_uncapped",
        "max z over visible keys, had there been no softcap",
        "logits",
        "(-inf, inf)",
        "max",
        "any",
        "ours",
        needs="softcap",
    ),
    Metric(
        "logit_std", "population standard deviation of z over visible keys", "logits", "[0, inf)", "mean", "any", "ours"
    ),
    Metric(
        "effective_temperature",
        "1 / mean over rows of logit_std",
        "1",
        "(0, inf]",
        "inverse_mean",
        "any",
        "ours, not the paper's",
        of="logit_std",
        log_scale=True,
    ),
    Metric("max_prob", "max p over visible keys", "1", "[0, 1]", "mean", "any", "ours"),
    Metric("top_mass", "sum of the N largest p", "1", "[0, 1]", "mean", "any", "paper, section 3"),
    Metric("first_mass", "p of the sequence's first key", "1", "[0, 1]", "mean", "any", "arXiv 2309.17453"),
    Metric("sink_mass", "p of the learned sink", "1", "[0, 1]", "mean", "any", "ours", needs="sinks"),
    Metric(
        "separability",
        "N_s / N: share of the N selected keys with |p_i x_i - s| < r",
        "1",
        "[0, 1]",
        "mean",
        "selection",
        "paper, section 3, Theorem 2",
        needs="value",
    ),
    Metric(
        "jacobian",
        "largest eigenvalue of (diag p - p p^T) / tau, mean over rows",
        "1",
        "[0, 1/(2 tau)]",
        "mean",
        "any",
        "paper, section 4 (bound corrected)",
        log_scale=True,
    ),
    Metric(
        "jacobian_max",
        "largest eigenvalue of (diag p - p p^T) / tau, maximum over rows",
        "1",
        "[0, 1/(2 tau)]",
        "max",
        "any",
        "paper, section 4 (bound corrected)",
        log_scale=True,
    ),
    Metric(
        "jacobian_fd",
        "|softmax((l + eps v)/tau) - softmax(l/tau)| / eps, v a random unit vector",
        "1",
        "[0, min(1/(2 tau), sqrt(2)/eps)]",
        "mean",
        "any",
        "paper, section 4, Algorithm 5 (bound corrected)",
        log_scale=True,
    ),
    Metric(
        "distance",
        "sum over unselected visible keys of |p_i x_i - s|; 0 where n <= N",
        "1",
        "[0, inf)",
        "mean",
        "any",
        "paper, section 3, Theorem 1",
        needs="value",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}


def resolve_metrics(names: Iterable[str] | str | None) -> tuple[str, ...]:
    """Return the names of the requested metrics in table order.

    Args:
        names: one name or several; None means all metrics.

    Raises:
        AttnmonError: a name is not in the table, or ``names`` is empty.
    """
    if names is None:
        return tuple(METRICS)
    requested = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in requested if name not in METRICS]
    if unknown:
        raise AttnmonError(
            f"unknown metric{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
            f"accepted are: {', '.join(METRICS)}"
        )
    if not requested:
        raise AttnmonError("metrics is empty; give at least one of: " + ", ".join(METRICS))
    return tuple(name for name in METRICS if name in requested)
