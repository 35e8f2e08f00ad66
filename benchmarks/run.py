"""Runs a benchmark, prints a table and writes JSON with the machine, the versions, the date and the commit.

python benchmarks/run.py overhead [--case NAME] [--quick] [--repeats N] [--peers]
python benchmarks/run.py memory [--case NAME] [--quick]
python benchmarks/run.py sampling [--case NAME] [--quick]
python benchmarks/run.py paper [--case NAME] [--length L] [--chunks N] [--quick]
python benchmarks/run.py accuracy [--backend torch|triton] [--quick]
python benchmarks/run.py kernel   [--backend torch|triton] [--quick] [--repeats N]
python benchmarks/run.py compile  [--quick]
python benchmarks/run.py gpu

accuracy, kernel and gpu run on the CUDA device if there is one; accuracy of "triton" without one runs in triton's
interpreter. compile needs no device.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the script runs from a clone, from any folder

from benchmarks import cases  # noqa: E402  (needs the line above)

RESULTS = ROOT / "benchmarks" / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure attnmon.")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    overhead = benchmarks.add_parser("overhead", help="step time with the monitor off, on, and the eager way")
    overhead.add_argument("--repeats", type=int, default=15, help="timed rounds (default: %(default)s)")
    overhead.add_argument("--warmup", type=int, default=2, help="untimed rounds (default: %(default)s)")
    overhead.add_argument("--peers", action="store_true", help="other ways of watching and compiled models as well")
    memory = benchmarks.add_parser("memory", help="peak memory of a step with the monitor off and on")
    sampling = benchmarks.add_parser("sampling", help="sampled statistics against those of all rows")
    paper = benchmarks.add_parser("paper", help="the paper's five experiments at GPT-2 124M's shape")
    paper.add_argument("--length", type=int, action="append", help="only this one; may be repeated")
    paper.add_argument("--chunks", type=int, default=4, help="pieces of text (default: %(default)s)")
    for subparser, names in (
        (overhead, [case.name for case in cases.OVERHEAD]),
        (memory, [case.name for case in cases.OVERHEAD]),
        (sampling, [case.name for case in cases.SAMPLING]),
        (paper, list(cases.PAPER)),
    ):
        subparser.add_argument("--case", action="append", choices=names, help="only this one; may be repeated")
        subparser.add_argument("--quick", action="store_true", help="one tiny case, to see that it works")
        subparser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/, not with --quick)")
    add_kernel_commands(benchmarks)
    args = parser.parse_args(argv)

    where, results = COMMANDS[args.benchmark](args)
    output = args.output
    if output is None and not args.quick:
        lengths = [f"L{length}" for length in getattr(args, "length", None) or ()]
        part = "".join(f"-{name}" for name in (*(args.case or ()), *lengths))
        output = RESULTS / f"{where}{part}.json"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": args.benchmark, **circumstances(), "cases": results}
        output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwrote {output}")
    return 0


def add_kernel_commands(benchmarks: Any) -> None:
    """Benchmarks of single calls and of the kernels."""
    accuracy = benchmarks.add_parser("accuracy", help="errors of every metric against the float64 reference")
    kernel = benchmarks.add_parser("kernel", help="one call: the reducer, the dense way, attention itself")
    kernel.add_argument("--repeats", type=int, default=7, help="timed rounds (default: %(default)s)")
    compiled = benchmarks.add_parser("compile", help="compile the kernels for devices that are not here")
    gpu = benchmarks.add_parser("gpu", help="everything that only a CUDA device can tell, in under 8 minutes")
    for subparser in (accuracy, kernel):
        subparser.add_argument("--backend", choices=("torch", "triton"), help="default: triton on CUDA, else torch")
    for subparser in (accuracy, kernel, compiled, gpu):
        subparser.set_defaults(case=None)
        subparser.add_argument("--quick", action="store_true", help="a smaller selection; no record unless --output")
        subparser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/)")


def device_and_backend(args: argparse.Namespace) -> tuple[str, str]:
    """Where a benchmark of single calls runs, and by which implementation."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, args.backend or ("triton" if device == "cuda" else "torch")


def run_accuracy(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Measure and print errors."""
    device, backend = device_and_backend(args)
    if backend == "triton" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    from benchmarks import accuracy

    results = accuracy.run(backend, device, ["near one-hot", "n = N + 1"] if args.quick else None)
    for dtype in accuracy.DTYPES:
        print_table(
            f"Relative error (separability: absolute), {backend} on {device}, {dtype}",
            accuracy.COLUMNS,
            accuracy.rows([result for result in results if result["dtype"] == dtype]),
        )
    return f"accuracy-{backend}-{device}", results


def run_kernel(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Measure and print times of single calls."""
    import torch

    from benchmarks import kernel

    device, backend = device_and_backend(args)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results = []
    for case in kernel.QUICK if args.quick else kernel.CASES:
        results.append(kernel.measure(case, backend, device, dtype, args.repeats, args.quick))
        print(" ".join(kernel.row(results[-1])), file=sys.stderr, flush=True)
    print_table(
        f"One call, {backend} on {device}, {machine()['line']}", kernel.COLUMNS, [kernel.row(one) for one in results]
    )
    kinds = dict.fromkeys((one["head_dim"], one["heads"], one["groups"]) for one in results)
    for kind in kinds:
        alike = [one for one in results if (one["head_dim"], one["heads"], one["groups"]) == kind]
        slopes = {name: kernel.exponent(alike, name) for name in kernel.VARIANTS}
        told = ", ".join(f"{name} {slope:.2f}" for name, slope in slopes.items() if slope is not None)
        print("d {}, {} heads, groups of {}: time grows with L to the power of ".format(*kind) + told)
    return f"kernel-{backend}-{device}", results


def run_compile(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Compile every kind of kernel and print what it needs."""
    from benchmarks import aot

    results = []
    for case in aot.CASES[:1] if args.quick else aot.CASES:
        for target in aot.TARGETS:
            for launch in aot.launches_of(case, target):
                usage = aot.compiled(launch, target)
                results.append({"case": case.name, "target": target, "kernel": launch.kernel.__name__, **usage})
    columns = ("registers", "spilled_bytes", "shared_bytes", "warps")
    lines = [[one["case"], one["kernel"], one["target"], *(str(one[column]) for column in columns)] for one in results]
    print_table("Compiled without a device", ("case", "kernel", "target", *columns), lines)
    return "kernels-aot", results


def run_gpu(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """The prepared script for a CUDA machine."""
    del args
    from benchmarks import gpu

    records = gpu.run()
    print("\n".join(gpu.summary(records)))
    return "gpu", records


def run_overhead(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Measure and print step times."""
    from benchmarks import overhead, peers

    variants = list(overhead.VARIANTS)
    for peer in overhead.PEERS if args.peers else ():
        if (reason := peers.missing(peer)) is None:
            variants.append(peer)
        else:
            print(f"{peer} is left out: {reason}", file=sys.stderr)
    results = []
    for case in selected(cases.OVERHEAD_QUICK if args.quick else cases.OVERHEAD, args.case):
        print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
        results.append(overhead.measure(case, args.repeats, args.warmup, variants))
    print_table(
        f"Training step, medians (20-80 %), {machine()['line']}",
        overhead.columns(variants),
        [overhead.row(one) for one in results],
    )
    return "overhead-cpu-peers" if args.peers else "overhead-cpu", results


def run_memory(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Measure and print peak memory."""
    from benchmarks import memory

    results = []
    for case in selected(cases.OVERHEAD_QUICK if args.quick else cases.OVERHEAD, args.case):
        print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
        results.append(memory.measure(case))
    title = f"Peak memory of {memory.STEPS} training steps, medians, {machine()['line']}"
    print_table(title, memory.COLUMNS, [memory.row(one) for one in results])
    return "memory-cpu", results


def run_sampling(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Measure and print sampling errors."""
    from benchmarks import sampling

    results = []
    for case in selected(cases.SAMPLING_QUICK if args.quick else cases.SAMPLING, args.case):
        results.append(sampling.measure(case))
        counts = results[-1]["rows_of_a_head"]
        print_table(
            f"{case.name}: error of {counts['sampled']} sampled of {counts['all']} rows, over heads",
            sampling.COLUMNS,
            sampling.rows(results[-1]),
        )
    return "sampling-cpu", results


def run_paper(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Measure and print how long the paper's experiments take."""
    from benchmarks import paper

    shape, lengths = (paper.QUICK, (32, 64)) if args.quick else (paper.GPT2, paper.LENGTHS)
    chunks = 1 if args.quick else args.chunks
    subject = paper.build(shape, lengths, chunks)
    results = []
    for case in args.case or cases.PAPER:
        print(f"measuring {case} ...", file=sys.stderr, flush=True)
        results.append(paper.measure(subject, case, lengths, chunks, args.length))
    title = f"The paper's experiments, {shape.layers} x {shape.heads} heads, wall time, {machine()['line']}"
    print_table(title, paper.COLUMNS, [paper.row(one) for one in results])
    return "paper-cpu", results


COMMANDS = {
    "overhead": run_overhead,
    "memory": run_memory,
    "sampling": run_sampling,
    "accuracy": run_accuracy,
    "kernel": run_kernel,
    "compile": run_compile,
    "gpu": run_gpu,
    "paper": run_paper,
}


def selected(table: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """The named cases, or all."""
    return [case for case in table if not names or case.name in names]


def circumstances() -> dict[str, Any]:
    """Where and when this was measured, and with what."""
    import torch

    packages = ("torch", "transformers", "numpy", "triton")
    commit = git("rev-parse", "HEAD")
    if commit and git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"):
        commit += " with local changes"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in packages if (version := installed(name))},
        },
        "torch_threads": torch.get_num_threads(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def installed(package: str) -> str | None:
    """Version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """CPU model, cores, memory, and all of it as one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    return {
        "cpu": model,
        "cores": cores,
        "memory_gib": memory,
        "line": f"{model}, {cores} cores" + (f", {memory} GiB" if memory else ""),
    }


def git(*arguments: str) -> str:
    """Output of a git command, "" where there is no git or no commit."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """With rich where it is installed, else plain."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        lines = [list(columns), *map(list, rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
        print(title)
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for line in rows:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 260).print(table)


if __name__ == "__main__":
    sys.exit(main())
