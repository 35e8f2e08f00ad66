"""Made-up records for the writers' tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnmon.types import Alert, Snapshot

SETTINGS = {"top_n": 16, "tokens": "value", "fd_epsilon": 0.1, "rows": 32, "sequences": 4}


def snapshot(values: Mapping[str, Mapping[str, Sequence[float]]], step: int = 0, **fields: Any) -> Snapshot:
    arrays = {
        name: {path: np.array(heads, dtype=np.float32) for path, heads in by.items()} for name, by in values.items()
    }
    modules = tuple(dict.fromkeys(path for by in values.values() for path in by))
    num_heads = {path: max(len(by[path]) for by in values.values() if path in by) for path in modules}
    counts = {path: np.full(count, 10, dtype=np.int64) for path, count in num_heads.items()}
    fields = {
        "rows": counts,
        "excluded": {path: heads // 5 for path, heads in counts.items()},
        "settings": SETTINGS,
    } | fields
    return Snapshot(step=step, modules=modules, values=arrays, **fields)


def grid(num_layers: int, num_heads: int, metrics: Sequence[str], step: int = 0) -> Snapshot:
    random = np.random.default_rng(step)
    paths = [f"transformer.h.{layer}.attn" for layer in range(num_layers)]
    return snapshot({name: {path: random.random(num_heads).tolist() for path in paths} for name in metrics}, step)


def alert(step: int = 7, **fields: Any) -> Alert:
    defaults: dict[str, Any] = {
        "step": step, "rule": "entropy_collapse", "severity": "warning", "module": "h.0.attn", "head": 3,
        "metric": "entropy_norm", "value": 0.03, "baseline": 0.6, "threshold": 0.3,
        "message": "Fell. Lower the learning rate.",
    }  # fmt: skip
    return Alert(**(defaults | fields))


RAGGED = {"entropy_norm": {"a.0": [0.1, 0.5, 0.9], "a.1": [0.25]}, "separability": {"a.0": [1.0, 0.5, 0.0]}}
