"""Everything that only a CUDA device can tell, in one script of under eight minutes.

Kernels against the reference, the operator's waits (there must be none), CUDA graphs and compiled models, then speed:
bytes/s against a measured copy, a call against attention itself, a GPT-2 training step with and without the monitor.
Not yet measured on a GPU: without one it says so and stops.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attnmon
from attnmon.call import make_call
from attnmon.stats.api import measure
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings
from benchmarks import accuracy, kernel
from benchmarks.overhead import quantiles

BUDGET = 450.0  # seconds; parts that would begin later are skipped and named
LONG = (8192, 32768)

# kinds of calls on which kernels and float64 streaming are compared; lengths past every block and split
_MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 300},
    "softcap, sinks": {"is_causal": True, "softcap": 20.0, "sinks": True},
    "bool mask": {"attn_mask": torch.bool},
    "float mask": {"attn_mask": torch.float32},
    "padding": {"key_padding_mask": torch.bool},
    "documents": {"is_causal": True, "cu_seqlens": True},
}
SHAPES = ((64, 64, 1), (128, 128, 4), (80, 80, 1), (192, 128, 1), (256, 256, 2), (16, 24, 1))
"""(head dimension, value dimension, group)."""


def variant(
    mask: str, shape: tuple[int, int, int], dtype: torch.dtype, length: int, device: str
) -> tuple[attnmon.types.AttentionCall, Settings]:
    """A call of one kind and the settings it is measured with."""
    generator = torch.Generator(device=device).manual_seed(length)
    batch = 1 if mask == "documents" else 2
    dim, width, group = shape

    def tensor(heads: int, size: int) -> Tensor:
        x = torch.randn(batch, length, heads, size, device=device, generator=generator)
        return x.to(dtype).transpose(1, 2)

    given = dict(_MASKS[mask])
    if given.get("sinks"):
        given["sinks"] = torch.linspace(-3.0, 3.0, 2 * group, device=device)
    if given.get("attn_mask") is torch.bool:
        given["attn_mask"] = torch.rand(1, 1, length, length, device=device, generator=generator) < 0.7
    elif given.get("attn_mask") is torch.float32:
        given["attn_mask"] = torch.randn(1, 2 * group, length, length, device=device, generator=generator)
    if given.get("key_padding_mask") is torch.bool:
        given["key_padding_mask"] = torch.arange(length, device=device)[None] < torch.tensor(
            [[0], [length // 3]], device=device
        )
    if given.get("cu_seqlens"):
        cuts = [0, 1, length // 3, length - 7, length]
        given["cu_seqlens"] = torch.tensor(cuts, device=device, dtype=torch.int32)
    call = make_call(tensor(2 * group, dim), tensor(2, dim), tensor(2, width), **given)
    available = [
        name for name, metric in attnmon.metrics.METRICS.items()
        if metric.needs not in ("sinks", "softcap") or given.get(metric.needs) is not None
    ]  # fmt: skip
    return call, Settings.create(metrics=available, rows=32)


def compare(
    mask: str, shape: tuple[int, int, int], dtype: torch.dtype, length: int, device: str, backend: str
) -> dict[str, Any]:
    """Largest error of each metric against float64 streaming, both on the device.

    Sampled rows whose selection float32 rounding can exchange differ in separability and distance; the count of
    rows, which must agree exactly, does not depend on it.
    """
    call, settings = variant(mask, shape, dtype, length, device)
    packing = Packing(settings.metrics)
    plan = make_plan(call, settings)
    got = measure(call, settings, plan, packing, backend).cpu().numpy()
    want = measure(call, settings, plan, packing, "torch", dtype=torch.float64).cpu().numpy()
    found, wanted = packing.values(got), packing.values(want)
    return {
        "mask": mask, "shape": shape, "dtype": str(dtype), "length": length,
        "counts_agree": bool((got[:4] == want[:4]).all()),
        "errors": {
            name: accuracy.error(torch.from_numpy(found[name]), torch.from_numpy(wanted[name]), name) for name in wanted
        },
    }  # fmt: skip


def correctness(device: str, backend: str, lengths: tuple[int, ...] = (129, 1000, 8192)) -> list[dict[str, Any]]:
    """Every kind of mask, shape and dtype at some length: kinds and shapes at all dtypes, each length several times."""
    results = []
    number = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pairs = [(mask, SHAPES[0]) for mask in _MASKS] + [("causal", shape) for shape in SHAPES[1:]]
        for mask, shape in pairs:
            results.append(compare(mask, shape, dtype, lengths[number % len(lengths)], device, backend))
            number += 1
    return results


def copy_bandwidth(device: str, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of a copy."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device, repeats=10)["median"]


def timed(run: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    """Seconds of a call, one untimed before."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return quantiles(seconds[1:])


def synchronize(device: str) -> None:
    """Waits for the device, where there is something to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(length: int, heads: int, device: str, backend: str, repeats: int = 20) -> dict[str, Any]:
    """Bytes of K (two passes) and V that one measurement reads, per second of its kernels; and sdpa's time."""
    case = kernel.KernelCase(length, 64, heads, 1, batch=4)
    q, k, v = kernel.inputs(case, device, torch.bfloat16)
    settings = Settings.create()
    call = make_call(q, k, v, is_causal=True)
    packing, plan = Packing(settings.metrics), make_plan(call, settings)
    reducer = timed(lambda: measure(call, settings, plan, packing, backend), device, repeats)
    sdpa = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, repeats)
    size = k.numel() * k.element_size()
    return {
        "length": length, "heads": heads, "batch": case.batch, "reducer": reducer, "sdpa": sdpa,
        "bytes": 3 * size, "bytes_per_second": 3 * size / reducer["median"],
    }  # fmt: skip


def waits(device: str, backend: str) -> None:
    """A measurement with its plan, under torch's check that nothing waits for the device."""
    call, settings = variant("causal", SHAPES[0], torch.bfloat16, 1024, device)
    packing = Packing(settings.metrics)
    measure(call, settings, make_plan(call, settings), packing, backend)  # tables, compilation
    synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        measure(call, settings, make_plan(call, settings, 1), packing, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_a_graph(device: str, backend: str) -> float:
    """Largest difference between a measurement replayed from a CUDA graph and the same made directly."""
    call, settings = variant("causal", SHAPES[0], torch.bfloat16, 1024, device)
    packing, plan = Packing(settings.metrics), make_plan(call, settings)
    direct = measure(call, settings, plan, packing, backend)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        measure(call, settings, plan, packing, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = measure(call, settings, plan, packing, backend)
    graph.replay()
    synchronize(device)
    return float((captured - direct).nan_to_num(0.0, 0.0, 0.0).abs().max())


def training(
    mode: str, device: str, *, layers: int = 12, dim: int = 768, heads: int = 12, length: int = 1024, batch: int = 16,
    vocab: int = 50257, repeats: int = 15, warmup: int = 4,
) -> dict[str, Any]:  # fmt: skip
    """Step time of a GPT-2 with the monitor off and on, bf16 autocast; mode "eager", "compiled" or "synchronous".

    "synchronous": measured steps run under torch's check that nothing waits for the device.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab, n_positions=length, n_embd=dim, n_layer=layers, n_head=heads, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    models = {name: GPT2LMHeadModel(config).to(device) for name in ("off", "on")}
    models["on"].load_state_dict(models["off"].state_dict())
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    monitor = attnmon.watch(models["on"])
    callables = {name: torch.compile(model) if mode == "compiled" else model for name, model in models.items()}
    tokens = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)

    def step(name: str) -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = callables[name](tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def watched(check: bool) -> None:
        if check:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with monitor.step():
                step("on")
        finally:
            if check:
                torch.cuda.set_sync_debug_mode("default")

    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for round_ in range(warmup + repeats):
        for name in ("off", "on") if round_ % 2 else ("on", "off"):
            synchronize(device)
            start = time.perf_counter()
            if name == "on":
                watched(mode == "synchronous" and round_ >= warmup)
            else:
                step("off")
            synchronize(device)
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    snapshot = monitor.flush()
    coverage = {record.path: (record.status, record.reason) for record in monitor.coverage()}
    monitor.close()
    assert snapshot is not None, coverage
    assert len(snapshot.modules) == layers, coverage
    return {
        "mode": mode, "layers": layers, "dim": dim, "length": length, "batch": batch,
        "seconds": {name: quantiles(times) for name, times in seconds.items()},
        "ratio": quantiles([on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]),
        "samples": seconds,
    }  # fmt: skip


def parts(device: str, backend: str) -> dict[str, Callable[[], Any]]:
    """What the script does, in order."""
    return {
        "accuracy": lambda: accuracy.run(backend, device),
        "correctness": lambda: correctness(device, backend),
        "nothing waits": lambda: waits(device, backend),
        "CUDA graph": lambda: in_a_graph(device, backend),
        "copy": lambda: copy_bandwidth(device),
        **{f"bandwidth L {n}": lambda n=n: bandwidth(n, 12, device, backend) for n in (1024, *LONG)},  # type: ignore[misc]
        "step, eager": lambda: training("eager", device),
        "step, nothing waits": lambda: training("synchronous", device, repeats=3),
        "step, compiled": lambda: training("compiled", device),
        "step, L 8192": lambda: training("eager", device, length=8192, batch=2, repeats=6, warmup=2),
        "step, L 32768": lambda: training("eager", device, layers=4, length=32768, batch=1, repeats=4, warmup=2),
    }


def run(device: str = "cuda", backend: str = "triton", budget: float = BUDGET) -> list[dict[str, Any]]:
    """All parts; one that fails is recorded with its error and does not end the others.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "not yet measured on a GPU: this machine has no CUDA device (torch.cuda.is_available() is False)"
        )
    started, records = time.perf_counter(), []
    for name, part in parts(device, backend).items():
        begun = time.perf_counter()
        if begun - started > budget:
            records.append({"part": name, "skipped": f"after {begun - started:.0f} s"})
            continue
        try:
            record: dict[str, Any] = {"part": name, "result": part()}
        except Exception as error:
            record = {"part": name, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        record["seconds"] = time.perf_counter() - begun
        records.append(record)
        print(f"{name}: {record.get('error', 'done')} ({record['seconds']:.1f} s)", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    return records


def summary(records: list[dict[str, Any]]) -> list[str]:
    """The figures to look at first, a line each."""
    found = {record["part"]: record.get("result") for record in records}
    lines = [f"FAILED {record['part']}: {record['error']}" for record in records if "error" in record]
    lines += [f"skipped {record['part']} {record['skipped']}" for record in records if "skipped" in record]
    for case in found.get("correctness") or ():
        limit = 1e-5 if "float32" in case["dtype"] else 1e-4
        over = {name: error for name, error in case["errors"].items() if error is not None and error > limit}
        if over or not case["counts_agree"]:
            lines.append(f"{case['mask']} {case['shape']} {case['dtype']} L {case['length']}: {over}")
    copy = found.get("copy")
    for name, result in found.items():
        if name.startswith("bandwidth") and result and copy:
            share = result["bytes_per_second"] / copy
            times = [result[kind]["median"] * 1e6 for kind in ("reducer", "sdpa")]
            lines.append(f"{name}: {times[0]:.0f} us (sdpa {times[1]:.0f} us), {share:.0%} of a copy's bytes/s")
        if name.startswith("step") and result:
            lines.append(f"{name}: on / off {result['ratio']['median']:.4f}")
    return lines
