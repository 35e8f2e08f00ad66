"""The specification of every metric: float64, dense, one row at a time; clear rather than fast.

Source: "Limitations of Normalization in Attention Mechanism" (arXiv 2508.17821), *the paper*, with the
corrections of the project's definitions. A row is one query of one sequence in one head and its n visible
keys; masked keys are no part of it. Every other implementation is tested against this file.
Shape legend: ``attnmon.types``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnmon.checks import check_choice, check_number, check_whole
from attnmon.errors import AttnmonError
from attnmon.metrics import METRICS, resolve_metrics
from attnmon.stats.directions import TABLE_SIZE, direction_start, direction_table
from attnmon.types import EXCLUSION_REASONS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Window = int | tuple[int | None, int | None] | None

MASK_LEVEL = -1e8
"""A float mask value this low hides the key in any dtype: some models mask with -1e9, no bias does."""

EIGENSOLVER_KEYS = 64
"""Rows up to this many keys take lambda_max from LAPACK, longer ones from the secular equation."""


def attention_stats(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: Window = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: int | None = None,
    sequences: int | None = None,
    top_n: int = 16,
    tokens: str = "value",
    fd_epsilon: float = 0.1,
    metrics: Iterable[str] | str | None = None,
    backend: str = "auto",
    hidden: Tensor | None = None,
    causal_offset: int = 0,
    is_cross: bool = False,
    logits: Tensor | None = None,
    head_dim: int | None = None,
) -> dict[str, Tensor]:
    """Every metric of one attention call, one number per query head.

    Args:
        query, key, value: [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]; any float dtype, strides, device.
        attn_mask: broadcastable to [B, H, Lq, Lk]; bool (True = visible) or float, added to the logits, where
            -inf, a value <= finfo(dtype).min / 2 or <= -1e8 hides the key.
        is_causal: query i sees keys j <= i + causal_offset (0: PyTorch's SDPA, aligned top-left).
        scale: positive factor of q.k; default 1 / sqrt(D).
        softcap: c in c * tanh(scale * q.k / c), before masks and bias.
        sinks: [H] logits of one key-less outcome per head (-inf: none).
        window: an int W: key j is visible where |i + causal_offset - j| < W; a pair (left, right), as in
            flash-attention: i + offset - left <= j <= i + offset + right, None or -1 without limit.
        key_padding_mask: [B, Lk]; bool (True = padding, as in nn.MultiheadAttention) or float (added).
        cu_seqlens: [documents + 1] int boundaries of documents packed into B = 1 (Lq = Lk).
        rows, sequences, backend: accepted for the common signature and ignored: every row is measured.
        top_n: N >= 1, size of the selected set.
        tokens: geometry of separability and distance: "value" (value vectors of unit length), "value_raw",
            "hidden" (``hidden``, [B, Lk, E], of unit length). A zero vector stays zero.
        fd_epsilon: step of the finite difference, in standard scaled logits, > 0.
        metrics: names of ``attnmon.metrics``; None: all that the call has the inputs for.
        is_cross: keys come from another sequence; then no query is padding because its key is masked.
        logits: [B, H, Lq, Lk], what the softmax reads, instead of query and key (``head_dim`` is then
            needed); hidden keys are told by their value as in a float mask, softcap is already in it.

    Returns:
        metric -> float32 [H] on the CPU; units and ranges in ``attnmon.metrics``. A head without a valid row
        for a metric is NaN.

    Raises:
        AttnmonError: a metric lacks its input, or an argument is out of range or of the wrong shape.
    """
    names = _select_metrics(metrics, softcap, sinks, value if tokens != "hidden" else hidden, tokens, logits)
    _check_options(top_n, fd_epsilon, tokens)
    call = prepare_call(
        query, key, logits=logits, head_dim=head_dim, scale=scale, softcap=softcap, attn_mask=attn_mask,
        is_causal=is_causal, causal_offset=causal_offset, window=window, key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens, sinks=sinks, is_cross=is_cross,
    )  # fmt: skip
    needs_tokens = any(METRICS[name].needs == "value" for name in names)
    vectors = token_vectors(value, hidden, tokens) if needs_tokens else None
    num_heads = call.logits.shape[1]
    result = {name: torch.empty(num_heads, dtype=torch.float32) for name in names}
    for head in range(num_heads):
        measured = []
        for b, i, keys, reason in iterate_rows(call, head):
            if reason is None:
                measured.append(
                    row_stats(
                        call.logits[b, head, i, keys],
                        None if vectors is None else vectors[b, head * vectors.shape[1] // num_heads, keys],
                        tau=call.tau,
                        sink=None if call.sinks is None else float(call.sinks[head]),
                        uncapped=None if call.uncapped is None else call.uncapped[b, head, i, keys],
                        query_position=i - int(call.first_key[b, i]),
                        key_positions=keys - int(call.first_key[b, i]),
                        top_n=top_n,
                        fd_epsilon=fd_epsilon,
                    )
                )
        for name in names:
            result[name][head] = merge_rows(name, measured)
    return result


def attention_rows(
    query: Tensor | None, key: Tensor | None, value: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """How many rows of each head are measured, and how many are left out for which reason.

    Args:
        query, key, value, options: those of ``attention_stats``; what no count of rows depends on is ignored.

    Returns:
        "rows" and each of ``EXCLUSION_REASONS`` -> int64 [H]; together they are all B * Lq rows.
        "padding": in self-attention, the query's own key is visible to no query of its sequence in head 0
        (whatever it sees itself); "masked": it sees no key; "nonfinite": a logit it sees is not finite.
    """
    ignored = {"rows", "sequences", "backend", "top_n", "tokens", "fd_epsilon", "metrics", "hidden"}
    call = prepare_call(query, key, **{name: given for name, given in options.items() if name not in ignored})
    num_heads = call.logits.shape[1]
    counts = {name: torch.zeros(num_heads, dtype=torch.int64) for name in ("rows", *EXCLUSION_REASONS)}
    for head in range(num_heads):
        for *_, reason in iterate_rows(call, head):
            counts[reason or "rows"][head] += 1
    return counts


def row_stats(
    logits: Floats,
    tokens: Floats | None = None,
    *,
    tau: float = 1.0,
    sink: float | None = None,
    uncapped: Floats | None = None,
    query_position: int = 0,
    key_positions: Ints | None = None,
    top_n: int = 16,
    fd_epsilon: float = 0.1,
) -> dict[str, float]:
    """All metrics of one valid row (paper, sections 2 to 4; ``attnmon.metrics`` for units and ranges).

    Args:
        logits: float64 [n], n >= 1, finite: z of the visible keys.
        tokens: float64 [n, E], x of the visible keys as the geometry is to see them, or None.
        tau: temperature 1 / (scale * sqrt(D)).
        sink: logit of the learned sink, or None.
        uncapped: float64 [n], logits as they were before softcap, or None.
        query_position, key_positions: counted from the sequence's first key; default 0 and 0 ... n - 1.
        top_n, fd_epsilon: N and eps.

    Returns:
        Metric -> number. A metric that the row does not have is absent: ``entropy_norm`` for n = 1,
        ``separability`` for n <= N, both geometric metrics without tokens.
    """
    z = np.asarray(logits, dtype=np.float64)
    n = z.size
    positions = np.arange(n) if key_positions is None else key_positions
    outcomes = z if sink is None else np.append(z, sink)
    p_all, rest_all, entropy = softmax_row(outcomes)
    p, rest, p_sink = p_all[:n], rest_all[:n], float(p_all[n:].sum())
    ranked = np.argsort(-p, kind="stable")  # equal weights: the lowest index is selected first
    inside, outside = ranked[:top_n], ranked[top_n:]
    stats = {
        "entropy": entropy,
        "max_logit": float(z.max()),
        "max_logit_uncapped": float((z if uncapped is None else uncapped).max()),
        "logit_std": float(z.std()),
        "max_prob": float(p.max()),
        "top_mass": float(p[inside].sum()),
        "first_mass": float(p[positions == 0].sum()),
        "sink_mass": p_sink,
        "jacobian": largest_eigenvalue(p, rest) / tau,
        "jacobian_fd": _finite_difference(outcomes, p_all, query_position, positions, tau, fd_epsilon),
    }
    stats["jacobian_max"] = stats["jacobian"]
    if n >= 2:
        stats["entropy_norm"] = entropy / math.log(outcomes.size)
    if tokens is not None:
        weighted = p[:, None] * tokens
        gaps = np.linalg.norm(weighted - weighted[inside].sum(axis=0), axis=1)
        stats["distance"] = float(gaps[outside].sum())
        if n > top_n:
            near = np.count_nonzero(nearer_keys(weighted, inside, outside, gaps))
            # N = 1: the selected key lies at distance 0, and a tie at 0 (identical tokens) is not held against it
            share = 1.0 if top_n == 1 else near / top_n
            stats["separability"] = share if np.isfinite(gaps).all() else math.nan
    return stats


def nearer_keys(weighted: Floats, inside: Ints, outside: Ints, gaps: Floats) -> Bools:
    """Which selected keys lie strictly nearer to s than every other key, bool [N].

    |p x - s|^2 - |s|^2 = p x . (p x - 2 s) orders the distances as |p x - s| does, and keeps its digits where tiny
    weights leave all distances equal to |s| in float64. Close to s it is the distance that keeps its digits.

    Args:
        weighted: float64 [n, E], p x of every key.
        inside, outside: int64 [N], [n - N], the selected keys and the others.
        gaps: float64 [n], |p x - s|.
    """
    s = weighted[inside].sum(axis=0)
    excess = (weighted * (weighted - 2.0 * s)).sum(axis=1)
    if gaps[outside].min() < 1e-3 * np.linalg.norm(s):
        excess = gaps
    nearer: Bools = excess[inside] < excess[outside].min()
    return nearer


def largest_eigenvalue(p: Floats, rest: Floats | None = None) -> float:
    """lambda_max of diag(p) - p p^T, in [0, 1/2].

    Args:
        p: float64 [n] weights of the keys; their sum is below 1 by the sink's weight.
        rest: 1 - p without cancellation; a nearly one-hot row needs it to come out with full relative accuracy.
    """
    rest = 1.0 - p if rest is None else rest
    if p.size <= EIGENSOLVER_KEYS:
        matrix = -np.outer(p, p)
        np.fill_diagonal(matrix, p * rest)
        return float(np.linalg.eigvalsh(matrix)[-1])
    return secular_eigenvalue(p, rest)


def secular_eigenvalue(p: Floats, rest: Floats) -> float:
    """lambda_max as the root of sum p_i^2 / (p_i - lambda) = 1 between the two largest weights; n >= 2.

    Solved for t = lambda - p_2 in the form
    ``h(t) = (p_2 + t - p_1 (1 - p_1)) - (p_1 - p_2 - t) * sum_{i >= 2} p_i^2 / (t + p_2 - p_i) = 0``,
    which rises from -inf at t = 0 to p_1^2 at t = p_1 - p_2 and cancels neither near ties nor near one-hot.

    Args:
        p: float64 [n] weights of the keys.
        rest: float64 [n], 1 - p without cancellation.

    Source: the project's definitions, section 4.
    """
    order = np.argsort(-p, kind="stable")
    first, tail = p[order[0]], p[order[1:]]
    gap, below = first - tail[0], tail[0] - tail
    if gap <= 0.0 or tail[0] <= 0.0:  # a tie: interlacing pins the eigenvalue; one single weight: its variance
        return float(max(tail[0], first * rest[order[0]]))
    # max p_i (1 - p_i) <= lambda <= 2 max p_i (1 - p_i), the latter by Gershgorin's discs; a little slack for rounding
    variance = float((p * rest).max())
    low = max(0.0, variance * (1.0 - 1e-9) - tail[0])
    high = min(gap, 2.0 * variance * (1.0 + 1e-9) - tail[0])
    for _ in range(200):
        t = 0.5 * (low + high)
        if not low < t < high:
            break
        h = (tail[0] + t - first * rest[order[0]]) - (gap - t) * (tail**2 / (t + below)).sum()
        low, high = (t, high) if h < 0.0 else (low, t)
    return float(tail[0] + 0.5 * (low + high))


def softmax_row(z: Floats) -> tuple[Floats, Floats, float]:
    """p [n], 1 - p [n] and the entropy of n outcomes, none of them by subtracting nearly equal numbers.

    With w = exp(z - max z) and R the sum of w over all but one largest outcome, the entropy
    ``logsumexp(z) - sum p z`` is ``log1p(R) + sum w (max z - z) / (1 + R)``: only terms >= 0.

    Args:
        z: float64 [n], logits.
    """
    top = int(z.argmax())
    below = z[top] - z
    w = np.exp(-below)
    others = float(np.delete(w, top).sum())
    total = 1.0 + others
    p = w / total
    rest = 1.0 - p
    rest[top] = others / total
    live = w > 0.0  # 0 * inf of a sink at -inf is no entropy
    return p, rest, math.log1p(others) + float((w[live] * below[live]).sum()) / total


def _finite_difference(
    outcomes: Floats, p_all: Floats, query_position: int, positions: Ints, tau: float, epsilon: float
) -> float:
    """|softmax(z + eps v / tau) - softmax(z)| / eps over the keys; a sink is not moved, but renormalized.

    With a the move, taken relative to that of the largest outcome, and m = sum p expm1(a), the new weight minus
    the old one is ``p (expm1(a) - m) / (1 + m)``: free of cancellation for small steps and for one-hot rows.
    """
    n = positions.size
    table = direction_table("cpu").numpy()
    v = table[(direction_start(query_position) + positions) % TABLE_SIZE].astype(np.float64)
    move = np.zeros_like(outcomes)
    move[:n] = epsilon * (v / np.linalg.norm(v)) / tau
    move -= move[p_all.argmax()]
    if move.max() < 500.0:
        growth = np.expm1(move)
        mean = float((p_all * growth).sum())
        difference = p_all * (growth - mean) / (1.0 + mean)
    else:  # so large a step that exp overflows, and nothing cancels
        difference = softmax_row(outcomes + move)[0] - p_all
    return float(np.linalg.norm(difference[:n])) / epsilon


def merge_rows(name: str, measured: list[dict[str, float]]) -> float:
    """A head's value from those of its valid rows; NaN where there is none.

    Args:
        name: of the metric.
        measured: what ``row_stats`` returned for each of the rows.
    """
    metric = METRICS[name]
    values = [row[metric.of or name] for row in measured if (metric.of or name) in row]
    if not values:
        return math.nan
    if metric.merge == "max":
        return float(np.max(values))
    mean = float(np.mean(values))
    if metric.merge == "inverse_mean":
        return math.inf if mean == 0.0 else 1.0 / mean
    return mean


# ---- from a call to its rows


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """z and visibility of every row; logits of hidden keys are never read."""

    logits: Floats  # [B, H, Lq, Lk]
    uncapped: Floats | None
    visible: Bools  # [B, H, Lq, Lk]
    first_key: Ints  # [B, Lq]
    padding: Bools  # [B, Lq]
    sinks: Floats | None  # [H]
    tau: float


def iterate_rows(call: PreparedCall, head: int) -> Iterator[tuple[int, int, Ints, str | None]]:
    """Every row of a head: its sequence, its query, its visible keys, and why it is left out.

    Args:
        call: the call.
        head: query head.

    Yields:
        sequence and query; int64 [n], indices of the visible keys; one of ``EXCLUSION_REASONS``, or None for a row
        that is measured.
    """
    bad_sink = call.sinks is not None and not call.sinks[head] < math.inf
    for b, i in np.ndindex(*call.padding.shape):
        keys = np.flatnonzero(call.visible[b, head, i])
        if call.padding[b, i]:
            reason: str | None = "padding"
        elif keys.size == 0:
            reason = "masked"
        else:
            finite = np.isfinite(call.logits[b, head, i, keys]).all() and not bad_sink
            reason = None if finite else "nonfinite"
        yield b, i, keys, reason


def prepare_call(
    query: Tensor | None,
    key: Tensor | None,
    *,
    logits: Tensor | None = None,
    head_dim: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    window: Window = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    is_cross: bool = False,
) -> PreparedCall:
    """z and visibility of every row of a call, in float64.

    Args:
        query, key, ...: those of ``attention_stats``.

    Raises:
        AttnmonError: an argument is out of range or of the wrong shape.
    """
    z, uncapped, visible, dim = base_logits(query, key, logits, head_dim, scale, softcap)
    batch, num_heads, num_queries, num_keys = z.shape
    factor = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    if not 0.0 < factor < math.inf:
        raise AttnmonError(f"scale has to be a positive number, got {scale!r}")
    masks = [] if attn_mask is None else [attn_mask]
    if key_padding_mask is not None:
        flipped = ~key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask
        masks.append(flipped[:, None, None, :])
    for mask in masks:
        shown, bias = _visible_and_bias(mask)
        visible = visible & shown
        with np.errstate(invalid="ignore"):  # inf - inf of a hidden or a broken entry
            z = z + bias
            uncapped = None if uncapped is None else uncapped + bias

    distance = np.arange(num_queries)[:, None] + causal_offset - np.arange(num_keys)[None, :]
    left, right = _window_sides(window)
    right = right if not is_causal else 0 if right is None else min(right, 0)
    if left is not None:
        visible = visible & (distance <= left)
    if right is not None:
        visible = visible & (distance >= -right)

    seen = visible[:, 0].any(axis=1)  # [B, Lk]: by any query, in head 0
    first_key = np.broadcast_to(seen.argmax(axis=1)[:, None], (batch, num_queries))
    if cu_seqlens is not None:
        if batch != 1 or num_queries != num_keys:
            raise AttnmonError(f"cu_seqlens needs B = 1, Lq = Lk, got B = {batch}, Lq = {num_queries}, Lk = {num_keys}")
        bounds = cu_seqlens.detach().cpu().numpy().astype(np.int64)
        document = np.searchsorted(bounds, np.arange(num_keys), side="right") - 1
        packed = (document >= 0) & (document < bounds.size - 1)  # tokens outside all documents are padding
        visible = visible & (document[:, None] == document[None, :]) & packed
        seen = visible[:, 0].any(axis=1)
        first_key = bounds[np.clip(document, 0, bounds.size - 2)][None, :]
    self_attention = num_queries == num_keys and not is_cross
    padding = np.logical_not(seen) if self_attention else np.zeros((batch, num_queries), dtype=np.bool_)
    sink_logits = None if sinks is None else _float64(sinks).reshape(num_heads)
    return PreparedCall(z, uncapped, visible, first_key, padding, sink_logits, 1.0 / (factor * math.sqrt(dim)))


def base_logits(
    query: Tensor | None,
    key: Tensor | None,
    logits: Tensor | None,
    head_dim: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Floats, Floats | None, Bools, int]:
    """Logits of a call before masks and bias.

    Args:
        query, key, logits, head_dim, scale, softcap: those of ``attention_stats``.

    Returns:
        z [B, H, Lq, Lk]; z without softcap, or None where there is no softcap; which keys the logits show,
        bool [B, H, Lq, Lk]; and D.

    Raises:
        AttnmonError: an argument is missing or of the wrong shape.
    """
    if logits is not None:
        if head_dim is None:
            raise AttnmonError("with logits, head_dim has to be given: the temperature depends on it")
        return _float64(logits), None, _visible_and_bias(logits)[0], head_dim
    if query is None or key is None:
        raise AttnmonError("query and key are needed, or logits together with head_dim")
    groups, remainder = divmod(query.shape[1], key.shape[1])
    if remainder or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise AttnmonError(
            f"query [B, H, Lq, D] and key [B, Hkv, Lk, D] with H a multiple of Hkv are expected, "
            f"got {list(query.shape)} and {list(key.shape)}"
        )
    q, k = (tensor.detach().to("cpu", torch.float64) for tensor in (query, key))
    raw = (q @ k.repeat_interleave(groups, dim=1).mT) * (q.shape[3] ** -0.5 if scale is None else float(scale))
    visible = np.ones(raw.shape, dtype=np.bool_)
    if softcap is None:
        return raw.numpy(), None, visible, q.shape[3]
    return (softcap * torch.tanh(raw / softcap)).numpy(), raw.numpy(), visible, q.shape[3]


def _visible_and_bias(mask: Tensor) -> tuple[Bools, Floats]:
    """Which entries a mask shows, and what it adds to the logits there."""
    if mask.dtype == torch.bool:
        shown: Bools = mask.detach().cpu().numpy()
        return shown, np.zeros(())
    added = _float64(mask)
    shown = ~(added <= max(torch.finfo(mask.dtype).min / 2, MASK_LEVEL))  # NaN is shown: a fault, not a mask
    return shown, np.where(shown, added, 0.0)


def _window_sides(window: Window) -> tuple[int | None, int | None]:
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (None, None)
    if isinstance(window, int) and window < 1:
        raise AttnmonError(f"window has to be at least 1 or a pair (left, right), got {window}")
    return None if left == -1 else left, None if right == -1 else right


def _float64(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def token_vectors(value: Tensor | None, hidden: Tensor | None, tokens: str) -> Floats:
    """Token vectors x as separability and distance see them, [B, Hkv or 1, Lk, E].

    Args:
        value: [B, Hkv, Lk, E]; may be None where ``tokens`` is "hidden".
        hidden: [B, Lk, E]; may be None where ``tokens`` is another.
        tokens: "value" (unit length), "value_raw" or "hidden" (unit length).
    """
    source = hidden if tokens == "hidden" else value
    assert source is not None  # _select_metrics has seen to it
    x = _float64(source)[:, None] if tokens == "hidden" else _float64(source)
    if tokens == "value_raw":
        return x
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # garbage in hidden keys
        return x / np.where(length == 0.0, 1.0, length)


def _select_metrics(
    metrics: Iterable[str] | str | None, softcap: float | None, sinks: Tensor | None, source: Tensor | None,
    tokens: str, logits: Tensor | None,
) -> tuple[str, ...]:  # fmt: skip
    names = resolve_metrics(metrics)
    present = {"": True, "softcap": softcap is not None and logits is None, "sinks": sinks is not None,
               "value": source is not None}  # fmt: skip
    if metrics is None:
        return tuple(name for name in names if present[METRICS[name].needs])
    geometric = [name for name in names if METRICS[name].needs == "value"]
    if geometric and source is None:
        argument = "hidden=[B, Lk, E]" if tokens == "hidden" else "value=[B, Hkv, Lk, Dv]"
        raise AttnmonError(f"{', '.join(geometric)} with tokens={tokens!r} need {argument}; pass it or leave them out")
    if "max_logit_uncapped" in names and softcap is not None and logits is not None:
        raise AttnmonError("max_logit_uncapped cannot be told from capped logits; pass query and key, or leave it out")
    return names


def _check_options(top_n: int, fd_epsilon: float, tokens: str) -> None:
    check_whole("top_n", top_n)
    check_number("fd_epsilon", fd_epsilon)
    check_choice("tokens", tokens, ("value", "value_raw", "hidden"))
