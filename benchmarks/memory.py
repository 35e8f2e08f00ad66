"""Peak memory of a training step with the monitor off and on: each in a process of its own, since peaks never fall."""

from __future__ import annotations

import contextlib
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import OVERHEAD, OVERHEAD_QUICK, OverheadCase

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
COLUMNS = ("case", "batch", "step off (MB)", "monitor (MB)", "monitor / step off")


def measure(case: OverheadCase, repeats: int = 3) -> dict[str, Any]:
    """Medians over ``repeats`` processes: what the peak grew by in three steps, off and on, in bytes."""
    peaks = {variant: [_peak_in_process(case, variant) for _ in range(repeats)] for variant in ("off", "on")}
    step, watched = (statistics.median(peaks[variant]) for variant in ("off", "on"))
    return {"name": case.name, **vars(case), "peak_bytes": peaks, "extra_share": (watched - step) / step}


def _peak_in_process(case: OverheadCase, variant: str) -> int:
    code = f"from benchmarks import memory; print(memory.peak_of_steps({case.name!r}, {variant!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def peak_of_steps(name: str, variant: str) -> int:
    """Bytes by which this process's peak grows in three training steps."""
    import torch

    import attnmon
    from benchmarks import overhead

    case = next(case for case in (*OVERHEAD, *OVERHEAD_QUICK) if case.name == name)
    model = overhead.build(case, ("off",))["off"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = attnmon.watch(model) if variant == "on" else None
    tokens = torch.randint(case.vocab, (case.batch, case.length), generator=torch.Generator().manual_seed(1))
    before = _peak()
    for _ in range(STEPS):
        with monitor.step() if monitor else contextlib.nullcontext():
            overhead.loss_of(model(tokens).logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _peak() - before


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def row(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    step, watched = (statistics.median(result["peak_bytes"][variant]) / 1e6 for variant in ("off", "on"))
    return [
        result["name"],
        str(result["batch"]),
        f"{step:.0f}",
        f"{watched - step:+.1f}",
        f"{100 * result['extra_share']:+.2f} %",
    ]
