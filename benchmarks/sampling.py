"""How far the sampled statistics (the monitor's defaults) are from those of all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnmon
from attnmon.metrics import METRICS
from attnmon.tiny_gpt2 import tiny_gpt2
from benchmarks.cases import SamplingCase

STEPS = 20
"""Measured steps: the error of one, and of their average."""


class Synthetic(nn.Module):
    """One attention call over fixed q, k, v whose heads range from flat to sharp."""

    def __init__(self, case: SamplingCase) -> None:
        super().__init__()
        head_dim = case.dim // case.heads
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, case.batch, case.heads, case.length, head_dim, generator=generator)
        low, high = case.sigmas
        sigmas = low * (high / low) ** torch.linspace(0, 1, case.heads)
        q = q * sigmas.view(1, -1, 1, 1)  # unit q.k / sqrt(d) has unit variance
        sink = F.normalize(q.mean(2), dim=-1) * math.sqrt(head_dim)
        k[:, ::2, 0] = 3 * sink[:, ::2]
        self.tensors = nn.ParameterList([q, k, v])

    def forward(self, _: Tensor) -> Tensor:
        q, k, v = self.tensors
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def build(case: SamplingCase) -> tuple[nn.Module, Tensor]:
    """The model, and the batch it is looked at with."""
    if case.kind == "synthetic":
        return Synthetic(case), torch.empty(0)
    torch.manual_seed(0)
    model = tiny_gpt2(layers=case.layers, heads=case.heads, width=case.dim, length=case.length)
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    windows = text.unfold(0, case.length, case.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(case.train_steps):
        tokens = windows[torch.randint(len(windows), (case.batch,))]
        logits = model(tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, windows[torch.randint(len(windows), (case.batch,))]


def snapshots(model: nn.Module, batch: Tensor, steps: int, **options: Any) -> list[attnmon.Snapshot]:
    """What the monitor says about the same batch at ``steps`` steps, with its sampling moving on."""
    found = []
    with attnmon.watch(model, rules=(), on_error="raise", **options) as monitor:
        for _ in range(steps):
            with monitor.step():
                model(batch)
            snapshot = monitor.flush()
            assert snapshot is not None
            found.append(snapshot)
    return found


def flat(snapshot: attnmon.Snapshot, metric: str) -> np.ndarray:
    """All heads of all modules, side by side."""
    return np.concatenate(list(snapshot[metric].values())).astype(np.float64)


def average(metric: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """Over steps, as the metric merges."""
    merge = METRICS[metric].merge
    if merge == "max":
        return np.max(values, axis=0)
    if merge == "inverse_mean":
        return 1 / np.mean([1 / value for value in values], axis=0)
    return np.mean(values, axis=0)


def errors(sampled: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Mean and maximum over heads of the absolute and the relative error."""
    absolute = np.abs(sampled - full)
    relative = absolute / np.maximum(np.abs(full), 1e-12)
    return {
        "abs_mean": float(absolute.mean()),
        "abs_max": float(absolute.max()),
        "rel_mean": float(relative.mean()),
        "rel_max": float(relative.max()),
    }


def measure(case: SamplingCase) -> dict[str, Any]:
    """Errors of every metric of one case."""
    model, batch = build(case)
    full = snapshots(model, batch, 1, rows=None, sequences=None)[0]
    sampled = snapshots(model, batch, STEPS)
    metrics: dict[str, Any] = {}
    for metric in full.metrics:
        truth = flat(full, metric)
        values = [flat(snapshot, metric) for snapshot in sampled]
        single = [errors(value, truth) for value in values]
        metrics[metric] = {
            "all_rows": {"min": float(truth.min()), "mean": float(truth.mean()), "max": float(truth.max())},
            "one_step": {
                name: (max if name.endswith("max") else np.mean)([one[name] for one in single]) for name in single[0]
            },
            f"average_of_{STEPS}": errors(average(metric, values), truth),
        }
    rows = {
        name: int(np.concatenate(list(found.rows.values())).min())
        for name, found in (("all", full), ("sampled", sampled[0]))
    }
    return {
        "name": case.name,
        **vars(case),
        "rows_of_a_head": rows,
        "settings": dict(sampled[0].settings),
        "metrics": metrics,
    }


COLUMNS = ("metric", "all rows: mean", "one step: mean", "max", "rel. mean", f"{STEPS} steps: mean", "max", "rel. mean")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """One line per metric: absolute errors over heads, mean and maximum, and the mean relative error."""
    table = []
    for metric, found in result["metrics"].items():
        one, many = found["one_step"], found[f"average_of_{STEPS}"]
        table.append(
            [
                metric,
                f"{found['all_rows']['mean']:.3g}",
                *(f"{one[name]:.2g}" for name in ("abs_mean", "abs_max")),
                f"{one['rel_mean']:.1%}",
                *(f"{many[name]:.2g}" for name in ("abs_mean", "abs_max")),
                f"{many['rel_mean']:.1%}",
            ]
        )
    return table
