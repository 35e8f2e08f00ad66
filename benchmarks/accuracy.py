"""Errors of every metric against the float64 reference, by backend, dtype and kind of row.

The reference sees the same rounded inputs. Adversarial rows are given as logits that are exact in the dtype (unit
keys), so that what is measured is the arithmetic and not the rounding of q.k, which no arithmetic can undo.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnmon.call import make_call
from attnmon.metrics import METRICS
from attnmon.stats import reference
from attnmon.stats.api import measure
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TARGETS = {"fp32": 1e-5, "bf16": 1e-4, "fp16": 1e-4}
TOP_N = 16
ROWS = 6


def _drawn(q_len: int, k_len: int, **options: Any) -> Callable[[torch.Generator, torch.dtype], dict[str, Any]]:
    def call(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        q = torch.randn(1, 4, q_len, 64, generator=generator) * 2.0
        k, v = torch.randn(2, 1, 2, k_len, 64, generator=generator)
        return {"query": q.to(dtype), "key": k.to(dtype), "value": v.to(dtype), **options}

    return call


def _rows(make: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator, torch.dtype], dict[str, Any]]:
    def call(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        z = make(generator).to(dtype)
        n = z.shape[-1]
        v = torch.randn(1, 1, n, 32, generator=generator)
        return {
            "query": z[None, None],
            "key": torch.eye(n, dtype=dtype)[None, None],
            "value": v.to(dtype),
            "scale": 1.0,
        }

    return call


def _one_hot(generator: torch.Generator) -> Tensor:
    z = torch.randn(ROWS, 200, generator=generator) - 30.0
    z[torch.arange(ROWS), torch.randint(200, (ROWS,), generator=generator)] = 0.5
    return z


def _of(n: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(ROWS, n, generator=generator)


CASES: dict[str, Callable[[torch.Generator, torch.dtype], dict[str, Any]]] = {
    "causal, L 129": _drawn(129, 129, is_causal=True, softcap=20.0, sinks=torch.linspace(-2.0, 2.0, 4)),
    "L 4096": _drawn(4, 4096),
    "near one-hot": _rows(_one_hot),
    "ties": _rows(lambda generator: torch.randn(ROWS, 20, generator=generator).repeat(1, 10)),
    "uniform": _rows(lambda generator: torch.zeros(ROWS, 200)),
    "logits of 1e4": _rows(lambda generator: 1e4 + torch.randn(ROWS, 200, generator=generator)),
    "n = 1": _rows(_of(1)),
    "n = 2": _rows(_of(2)),
    "n = N": _rows(_of(TOP_N)),
    "n = N + 1": _rows(_of(TOP_N + 1)),
}


def error(got: Tensor, want: Tensor, metric: str) -> float | None:
    """Largest error over heads: relative, for separability (a share of comparisons) absolute; None: no data."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    known = ~want.isnan()
    if not bool(known.any()):
        return None
    difference = torch.where(got == want, 0.0, (got - want).abs())[known]
    scale = torch.ones_like(difference) if metric == "separability" else want[known].abs()
    return float((difference / torch.where(difference == 0, 1.0, scale)).max())


def measure_case(name: str, dtype: str, backend: str, device: str) -> dict[str, float | None]:
    """Metric -> error of one kind of row."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    call = CASES[name](generator, DTYPES[dtype])
    wanted = reference.attention_stats(**call, top_n=TOP_N)
    settings = Settings.create(metrics=tuple(wanted), rows=None, sequences=None, top_n=TOP_N)
    moved = {key: given.to(device) if isinstance(given, Tensor) else given for key, given in call.items()}
    prepared = make_call(moved.pop("query"), moved.pop("key"), moved.pop("value"), **moved)
    packing = Packing(settings.metrics)
    packed = measure(prepared, settings, make_plan(prepared, settings), packing, backend)
    found = packing.values(packed.double().cpu().numpy())
    return {metric: error(torch.from_numpy(found[metric]), wanted[metric], metric) for metric in wanted}


def run(backend: str, device: str, names: list[str] | None = None) -> list[dict[str, Any]]:
    """All errors of a backend: one record a dtype and kind of row."""
    return [
        {"backend": backend, "device": device, "dtype": dtype, "case": name, "target": TARGETS[dtype],
         "errors": measure_case(name, dtype, backend, device)}
        for dtype in DTYPES
        for name in names or CASES
    ]  # fmt: skip


COLUMNS = ("metric", *CASES)


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A table of one backend and dtype."""
    by_case = {result["case"]: result["errors"] for result in results}
    lines = []
    for metric in METRICS:
        cells = [by_case.get(name, {}).get(metric) for name in CASES]
        if any(cell is not None for cell in cells):
            lines.append([metric, *("" if cell is None else f"{cell:.0e}" if cell else "0" for cell in cells)])
    return lines
