"""What is to be measured of rows whose weights are no softmax: float64, row by row (definitions, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnmon.metrics import METRICS
from attnmon.stats import reference
from attnmon.stats.directions import TABLE_SIZE, direction_start, direction_table

Normalizer = Callable[[Tensor], Tensor]


def exact_entmax(z: Tensor, alpha: float) -> Tensor:
    """alpha-entmax of rows [..., n], float64: p = [(alpha - 1) z - t]_+^(1 / (alpha - 1)) by bisection."""
    scaled = (alpha - 1.0) * z.double()
    low, high = scaled.amax(-1, keepdim=True) - 1.0, scaled.amax(-1, keepdim=True)
    for _ in range(200):
        middle = 0.5 * (low + high)
        above = (scaled - middle).clamp(min=0.0).pow(1.0 / (alpha - 1.0)).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = (scaled - low).clamp(min=0.0).pow(1.0 / (alpha - 1.0))
    return p / p.sum(-1, keepdim=True)


def weight_row(
    z: np.ndarray,
    p: np.ndarray,
    normalizer: Normalizer,
    *,
    alpha: float,
    tau: float = 1.0,
    tokens: np.ndarray | None = None,
    query_position: int = 0,
    top_n: int = 16,
    fd_epsilon: float = 0.1,
) -> dict[str, float]:
    """All metrics of one row of visible keys: logits z and weights p [n], tokens x [n, E]."""
    n = z.size
    support = p > 0
    ranked = np.argsort(-p, kind="stable")
    inside, outside = ranked[:top_n], ranked[top_n:]
    s = np.where(support, np.where(support, p, 1.0) ** (2.0 - alpha), 0.0)
    jacobian = np.diag(s) - np.outer(s, s) / s.sum()
    table = direction_table("cpu").double().numpy()
    v = table[(direction_start(query_position) + np.arange(n)) % TABLE_SIZE]
    moved = torch.from_numpy(z + fd_epsilon * v / np.linalg.norm(v) / tau)
    difference = normalizer(moved) - normalizer(torch.from_numpy(z))
    stats = {
        "entropy": float(-(p[support] * np.log(p[support])).sum()),
        "max_logit": float(z.max()),
        "logit_std": float(z.std()),
        "max_prob": float(p.max()),
        "top_mass": float(p[inside].sum()),
        "first_mass": float(p[0]),
        "jacobian": float(np.linalg.eigvalsh(jacobian)[-1]) / tau,
        "jacobian_fd": float(difference.norm()) / fd_epsilon,
    }
    stats["jacobian_max"] = stats["jacobian"]
    if n >= 2:
        stats["entropy_norm"] = stats["entropy"] / math.log(n)
    if tokens is not None:
        weighted = p[:, None] * tokens
        gaps = np.linalg.norm(weighted - weighted[inside].sum(axis=0), axis=1)
        stats["distance"] = float(gaps[outside].sum())
        if n > top_n:
            near = np.count_nonzero(reference.nearer_keys(weighted, inside, outside, gaps))
            stats["separability"] = 1.0 if top_n == 1 else near / top_n
    return stats


def weight_stats(
    logits: Tensor, weights: Tensor, values: Tensor | None, alpha: list[float], **options: Any
) -> dict[str, Tensor]:
    """metric -> float32 [H] over all rows of logits and weights [B, H, Lq, Lk]; -inf hides a key.

    Every row's first visible key is taken to be key 0, as under a causal mask.
    """
    batch, heads, length, _ = logits.shape
    x = None if values is None else torch.nn.functional.normalize(values.double(), dim=-1).numpy()
    result: dict[str, list[float]] = {}
    for head in range(heads):
        rows = []
        for b in range(batch):
            for i in range(length):
                seen = np.flatnonzero(logits[b, head, i].double().numpy() > -1e7)
                rows.append(
                    weight_row(
                        logits[b, head, i].double().numpy()[seen],
                        weights[b, head, i].double().numpy()[seen],
                        lambda z, a=alpha[head]: exact_entmax(z, a),
                        alpha=alpha[head],
                        tokens=None if x is None else x[b, head * x.shape[1] // heads, seen],
                        query_position=i,
                        **options,
                    )
                )
        for name in METRICS:
            if METRICS[name].needs in ("", "value") and (x is not None or METRICS[name].needs == ""):
                result.setdefault(name, []).append(reference.merge_rows(name, rows))
    return {name: torch.tensor(found, dtype=torch.float32) for name, found in result.items()}
