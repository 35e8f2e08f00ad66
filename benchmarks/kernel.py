"""One attention call: the reducer against the dense way and against the attention itself.

reducer: plan and measurement of one call at the monitor's defaults (32 rows of 4 sequences, every metric).
dense: softmax of the full scores, then the same metrics of all rows with dense torch operations, as one would write
them first. sdpa: ``scaled_dot_product_attention`` forward alone.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnmon.call import make_call
from attnmon.stats.api import measure as measure_call
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings
from benchmarks.overhead import quantiles

VARIANTS = ("reducer", "dense", "sdpa")


@dataclass(frozen=True)
class KernelCase:
    """A causal call of ``batch`` sequences; ``groups`` query heads share a key head."""

    length: int
    head_dim: int
    heads: int
    groups: int
    batch: int

    @property
    def name(self) -> str:
        return f"L{self.length}-d{self.head_dim}-h{self.heads}-g{self.groups}-b{self.batch}"


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CASES = tuple(
    KernelCase(length, head_dim, heads, groups, batch=4)
    for head_dim in (64, 128)
    for heads in (8, 32)
    for groups in (1, 4)
    for length in LENGTHS
)
QUICK = tuple(KernelCase(length, 64, 8, 1, batch=1) for length in LENGTHS if length <= 8192)


def inputs(case: KernelCase, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as models lay them out, [B, L, H, D] seen as [B, H, L, D]; logits of unit variance."""
    generator = torch.Generator(device=device).manual_seed(0)

    def tensor(heads: int) -> Tensor:
        shape = (case.batch, case.length, heads, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

    kv_heads = case.heads // case.groups
    return tensor(case.heads), tensor(kv_heads), tensor(kv_heads)


def reducer(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """The packed matrix of one call."""
    settings = Settings.create()
    call = make_call(q, k, v, is_causal=True)
    return measure_call(call, settings, make_plan(call, settings), Packing(settings.metrics), backend)


@torch.no_grad()
def dense(q: Tensor, k: Tensor, v: Tensor, top_n: int = 16, epsilon: float = 0.1) -> dict[str, Tensor]:
    """Every metric of every row from full matrices [B, H, L, L], float32; the eigenvalue by ten power iterations."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    length = q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    z = (q.float() @ k.mT / math.sqrt(q.shape[3])).masked_fill_(hidden, -math.inf)
    n = torch.arange(1, length + 1, device=q.device, dtype=torch.float32)
    p = z.softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    zeroed = z.masked_fill(hidden, 0.0)
    mean = zeroed.sum(-1) / n
    std = ((zeroed - mean[..., None]).masked_fill_(hidden, 0.0).square().sum(-1) / n).sqrt()
    top, index = p.topk(min(top_n, length), -1)
    selected = torch.zeros_like(p).scatter_(-1, index, top)
    x = F.normalize(v, dim=-1)
    s = selected @ x
    gaps = (p * p - 2.0 * p * (s @ x.mT) + s.square().sum(-1, keepdim=True)).clamp_(min=0.0).sqrt_()
    outside = ~(hidden | (selected > 0))
    radius = torch.where(outside, gaps, math.inf).amin(-1, keepdim=True)
    separability = ((gaps < radius) & (selected > 0)).sum(-1) / top_n
    distance = torch.where(outside, gaps, 0.0).sum(-1)
    vector = selected.clone()
    eigenvalue = torch.zeros_like(entropy)
    for _ in range(10):
        vector = F.normalize(vector, dim=-1)
        vector = p * (vector - (p * vector).sum(-1, keepdim=True))
        eigenvalue = torch.linalg.vector_norm(vector, dim=-1)
    direction = torch.randn(length, length, device=q.device).masked_fill_(hidden, 0.0)
    moved = (z + epsilon * F.normalize(direction, dim=-1)).softmax(-1)
    step = torch.linalg.vector_norm(moved - p, dim=-1) / epsilon
    rows = {
        "entropy": entropy, "entropy_norm": entropy / n.log().clamp(min=1e-12), "logit_std": std,
        "max_prob": top[..., 0], "top_mass": top.sum(-1), "first_mass": p[..., 0], "separability": separability,
        "distance": distance, "jacobian": eigenvalue, "jacobian_fd": step,
    }  # fmt: skip
    heads = {name: value.mean((0, 2)) for name, value in rows.items()}
    return {**heads, "max_logit": z.amax((0, 2, 3)), "jacobian_max": eigenvalue.amax((0, 2))}


class PeakBytes(TorchDispatchMode):
    """Bytes of the tensors that operations return, alive at the same time; temporaries inside them do not count.

    Nor do views of ``inputs``, tensors that were there before.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self._before = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._watch(tensor)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._before:
            return
        if key not in self._users:
            self.alive += size
            self.peak = max(self.peak, self.alive)
        self._users[key] = self._users.get(key, 0) + 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self.alive -= size


def peak_bytes(run: Callable[[], Any], device: str, inputs: Sequence[Tensor]) -> int:
    """Memory that a call takes beyond its inputs: of the allocator on CUDA, of returned tensors on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with PeakBytes(inputs) as tracker:
        run()
    return tracker.peak


def dense_fits(case: KernelCase, device: str, quick: bool) -> bool:
    """Whether about ten full float32 matrices fit, and, in a quick run on a CPU, end soon."""
    elements = case.batch * case.heads * case.length**2
    if device == "cuda":
        return elements * 40 < 0.8 * torch.cuda.mem_get_info()[0]
    return elements <= (1 << 25 if quick else 1 << 27)


def sdpa_fits(case: KernelCase, device: str, quick: bool) -> bool:
    """On a CPU: not more than some seconds a call."""
    del quick
    work = case.batch * case.heads * case.length**2 * case.head_dim
    return device == "cuda" or work <= 1 << 36


def measure(
    case: KernelCase, backend: str, device: str, dtype: torch.dtype, repeats: int, quick: bool
) -> dict[str, Any]:
    """Times and memory of one case; the variants take turns within a round."""
    q, k, v = inputs(case, device, dtype)
    gqa = {"enable_gqa": True} if case.groups > 1 else {}
    runs: dict[str, Callable[[], Any]] = {"reducer": lambda: reducer(q, k, v, backend)}
    if dense_fits(case, device, quick):
        runs["dense"] = lambda: dense(q, k, v)
    if sdpa_fits(case, device, quick):
        runs["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for round_ in range(repeats + 1):
            for name, run in runs.items():
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                if device == "cuda":
                    torch.cuda.synchronize()
                if round_ > 0:
                    seconds[name].append(time.perf_counter() - start)
        memory = {name: peak_bytes(run, device, (q, k, v)) for name, run in runs.items()}
    return {
        "name": case.name, **vars(case), "backend": backend, "dtype": str(dtype), "repeats": repeats,
        "seconds": {name: quantiles(times) for name, times in seconds.items()},
        "peak_bytes": memory, "skipped": [name for name in VARIANTS if name not in runs], "samples": seconds,
    }  # fmt: skip


def exponent(results: Sequence[dict[str, Any]], variant: str = "reducer", least: int = 0) -> float | None:
    """Slope of log time against log L over cases that differ in L alone, from ``least`` on; None: fewer than two."""
    points = [
        (math.log(result["length"]), math.log(result["seconds"][variant]["median"]))
        for result in results
        if variant in result["seconds"] and result["length"] >= least
    ]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


COLUMNS = ("case", *(f"{name} (ms)" for name in VARIANTS), *(f"{name} (MiB)" for name in VARIANTS))


def row(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    times, memory = result["seconds"], result["peak_bytes"]
    return [
        result["name"],
        *(f"{1e3 * times[name]['median']:.2f}" if name in times else "skipped" for name in VARIANTS),
        *(f"{memory[name] / 2**20:.1f}" if name in memory else "" for name in VARIANTS),
    ]
