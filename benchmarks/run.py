"""Runs a benchmark, prints a table and writes JSON with the machine, the versions, the date and the commit.

python benchmarks/run.py overhead [--case NAME] [--quick] [--repeats N]
python benchmarks/run.py sampling [--case NAME] [--quick]
python benchmarks/run.py paper [--case NAME] [--length L] [--chunks N] [--quick]
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
    sampling = benchmarks.add_parser("sampling", help="sampled statistics against those of all rows")
    paper = benchmarks.add_parser("paper", help="the paper's five experiments at GPT-2 124M's shape")
    paper.add_argument("--length", type=int, action="append", help="only this one; may be repeated")
    paper.add_argument("--chunks", type=int, default=4, help="pieces of text (default: %(default)s)")
    for subparser, names in (
        (overhead, [case.name for case in cases.OVERHEAD]),
        (sampling, [case.name for case in cases.SAMPLING]),
        (paper, list(cases.PAPER)),
    ):
        subparser.add_argument("--case", action="append", choices=names, help="only this one; may be repeated")
        subparser.add_argument("--quick", action="store_true", help="one tiny case, to see that it works")
        subparser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/, not with --quick)")
    args = parser.parse_args(argv)

    results = {"overhead": run_overhead, "sampling": run_sampling, "paper": run_paper}[args.benchmark](args)
    output = args.output
    if output is None and not args.quick:
        lengths = [f"L{length}" for length in getattr(args, "length", None) or ()]
        part = "".join(f"-{name}" for name in (*(args.case or ()), *lengths))
        output = RESULTS / f"{args.benchmark}-cpu{part}.json"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        record = {"benchmark": args.benchmark, **circumstances(), "cases": results}
        output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwrote {output}")
    return 0


def run_overhead(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print step times."""
    from benchmarks import overhead

    results = []
    for case in selected(cases.OVERHEAD_QUICK if args.quick else cases.OVERHEAD, args.case):
        print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
        results.append(overhead.measure(case, args.repeats, args.warmup))
    print_table(
        f"Training step, medians (20-80 %), {machine()['line']}",
        overhead.COLUMNS,
        [overhead.row(one) for one in results],
    )
    return results


def run_sampling(args: argparse.Namespace) -> list[dict[str, Any]]:
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
    return results


def run_paper(args: argparse.Namespace) -> list[dict[str, Any]]:
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
    return results


def selected(table: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """The named cases, or all."""
    return [case for case in table if not names or case.name in names]


def circumstances() -> dict[str, Any]:
    """Where and when this was measured, and with what."""
    import torch

    packages = ("torch", "transformers", "numpy")
    commit = git("rev-parse", "HEAD")
    if commit and git("status", "--porcelain", "--untracked-files=no"):
        commit += " with local changes"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "torch_threads": torch.get_num_threads(),
    }


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
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
