"""``attnmon paper --from-run``: separability and sensitivity of each head over the training steps of a monitored run.

The numbers are those that the monitor wrote, on the rows that it sampled; nothing is computed anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from attnmon.errors import AttnmonError, AttnmonWarning
from attnmon.paper.figures import lines_over_steps
from attnmon.paper.page import Section, number, render_page
from attnmon.paper.report import save_figure
from attnmon.paper.store import Record, check_writable, write_atomic, write_table
from attnmon.types import Snapshot
from attnmon.writers.jsonl import DEFAULT_NAME, read_jsonl

PAGE = "run.html"
SEPARABILITY, SENSITIVITY = "separability", "sensitivity"
_METRICS = {SEPARABILITY: ("separability",), SENSITIVITY: ("jacobian", "jacobian_max", "jacobian_fd")}
_TITLES = {
    "separability": "Separability N_s/N",
    "jacobian": "Spectral norm of the softmax Jacobian, mean over rows",
    "jacobian_max": "Spectral norm of the softmax Jacobian, largest row",
    "jacobian_fd": "Finite-difference sensitivity, mean over rows",
}
_LEGEND = "a panel a module, heads from dark (the first) to light"


@dataclass(frozen=True)
class LoggedRun:
    """A run's snapshots in order of their steps.

    Attributes:
        path: the file.
        snapshots: at least one.

    Source: ours.
    """

    path: Path
    snapshots: tuple[Snapshot, ...]


def find_log(log: Path) -> Path:
    """Find the JSON Lines file of a run.

    Args:
        log: the file itself, or a folder with one ``attnmon.jsonl`` in or below it.

    Returns:
        The file.

    Raises:
        AttnmonError: there is none, or more than one.

    Source: ours.
    """
    if log.is_file():
        return log
    if not log.is_dir():
        raise AttnmonError(f"--from-run {log}: there is no such file or folder")
    found = sorted(log.rglob(DEFAULT_NAME))
    if not found:
        raise AttnmonError(
            f"--from-run {log}: no {DEFAULT_NAME} in it; "
            "monitor the run with writers=[attnmon.writers.JsonlWriter(DIR)]"
        )
    if len(found) > 1:
        raise AttnmonError(
            f"--from-run {log}: {len(found)} runs below it ({', '.join(str(path) for path in found[:3])}"
            f"{', ...' if len(found) > 3 else ''}); name one of them"
        )
    return found[0]


def read_run(log: Path) -> LoggedRun:
    """Read the snapshots of a run; of a step that was written twice (a run that was resumed) the last one counts.

    Args:
        log: the file, or a folder with one ``attnmon.jsonl`` in or below it.

    Returns:
        The run, its snapshots in order of their steps.

    Raises:
        AttnmonError: there is no log, it cannot be read, or it holds no snapshot with the metrics drawn here.

    Source: ours.
    """
    path = find_log(log)
    by_step: dict[int, Snapshot] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("always", AttnmonWarning)
        try:
            for record in read_jsonl(path):
                if isinstance(record, Snapshot):
                    by_step[record.step] = record
        except OSError as error:
            raise AttnmonError(f"cannot read --from-run {path}: {error.strerror}") from error
    wanted = {metric for metrics in _METRICS.values() for metric in metrics}
    snapshots = tuple(by_step[step] for step in sorted(by_step) if wanted & set(by_step[step].metrics))
    if not snapshots:
        raise AttnmonError(
            f"--from-run {path}: no snapshot with {', '.join(sorted(wanted))}; monitor the run with one of them"
        )
    return LoggedRun(path, snapshots)


def write_run_report(log: Path, out: Path) -> list[Path]:
    """Write tables, figures and page of a run.

    Args:
        log: the file, or a folder with one ``attnmon.jsonl`` in or below it.
        out: folder of results; made once the log has been read.

    Returns:
        The files, the page last.

    Raises:
        AttnmonError: the log cannot be read, or ``out`` cannot be written.

    Source: ours; separability and sensitivity are those of the paper's experiments 4 and 5, over training steps.
    """
    run = read_run(log)
    check_writable(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AttnmonError(f"cannot write to --out {out}: {error.strerror}") from error
    written: list[Path] = []
    sections = []
    for experiment, metrics in _METRICS.items():
        records = run_records(run, metrics)
        if not records:
            continue
        written += write_table(out, f"run-{experiment}", records)
        present = [metric for metric in metrics if any(metric in snapshot for snapshot in run.snapshots)]
        pictures = []
        for metric in present:
            picture, files = save_figure(out / "figures", f"run-{metric}", _figure(run, metric), _caption(run, metric))
            pictures.append(picture)
            written += files
        columns, rows = _table(run, present)
        title = "Separability over training" if experiment == SEPARABILITY else "Sensitivity over training"
        sections.append(Section(title, pictures, columns, rows))
    last = run.snapshots[-1]
    heads = sum(len(values) for values in next(iter(last.values.values())).values())
    page = render_page(
        "Separability and sensitivity over training",
        "One line a head, as the monitor wrote them. N_s/N is no quality score: stronger separation often goes with "
        "worse loss. Watch the change of a head from its own baseline, not its level.",
        [
            ("run", str(run.path)),
            ("steps", f"{run.snapshots[0].step:,} to {last.step:,}, {len(run.snapshots):,} snapshots"),
            ("heads", f"{heads} in {len(last.modules)} modules"),
            ("settings", ", ".join(f"{name} = {value}" for name, value in last.settings.items()) or "not in the log"),
        ],
        (),
        sections,
        "Tables of every step and head: run-separability.csv, run-sensitivity.csv; figures (PNG, SVG) under figures/.",
    )
    write_atomic(out / PAGE, page)
    return [*written, out / PAGE]


def run_records(run: LoggedRun, metrics: Sequence[str]) -> list[Record]:
    """List the metrics of a run by step, module and head.

    Args:
        run: its snapshots.
        metrics: names, which become columns.

    Returns:
        Records of step, module, head and the metrics; None where a snapshot has no number.

    Source: ours.
    """
    records: list[Record] = []
    for snapshot in run.snapshots:
        present = [metric for metric in metrics if metric in snapshot]
        for module in snapshot.modules:
            sizes = [len(snapshot[metric][module]) for metric in present if module in snapshot[metric]]
            for head in range(max(sizes, default=0)):
                values = {metric: _value(snapshot, metric, module, head) for metric in metrics}
                records.append({"step": snapshot.step, "module": module, "head": head, **values})
    return records


def _value(snapshot: Snapshot, metric: str, module: str, head: int) -> float | None:
    if metric not in snapshot or module not in snapshot[metric]:
        return None
    value = float(snapshot[metric][module][head])
    return value if np.isfinite(value) else None


def _series(run: LoggedRun, metric: str) -> tuple[list[int], dict[tuple[str, int], list[float]]]:
    """Collect the steps, and each head's values at them (NaN where there is none)."""
    steps = [snapshot.step for snapshot in run.snapshots]
    heads: dict[tuple[str, int], list[float]] = {}
    for index, snapshot in enumerate(run.snapshots):
        for module, values in snapshot.values.get(metric, {}).items():
            for head, value in enumerate(values.tolist()):
                heads.setdefault((module, head), [float("nan")] * len(steps))[index] = value
    return steps, heads


def _figure(run: LoggedRun, metric: str) -> Figure:
    steps, heads = _series(run, metric)
    return lines_over_steps(steps, heads, _TITLES[metric], log=metric != "separability")


def _caption(run: LoggedRun, metric: str) -> str:
    settings = run.snapshots[-1].settings
    if metric == "separability":
        at = f" at N = {settings['top_n']}" if "top_n" in settings else ""
        return f"{_TITLES[metric]}{at} of each head over training steps, {_LEGEND}."
    return f"{_TITLES[metric]}, of each head over training steps, {_LEGEND}."


def _table(run: LoggedRun, metrics: Sequence[str]) -> tuple[Sequence[str], list[list[str]]]:
    """Tabulate first, last, least and largest value of each head."""
    columns = ["module", "head"]
    rows: dict[tuple[str, int], list[str]] = {}
    for metric in metrics:
        columns += [f"{metric}: first", "last", "least", "largest"]
        for key, values in _series(run, metric)[1].items():
            finite = [value for value in values if np.isfinite(value)]
            cells = [finite[0], finite[-1], min(finite), max(finite)] if finite else [float("nan")] * 4
            rows.setdefault(key, [key[0] or "model", str(key[1])]).extend(number(cell) for cell in cells)
    return columns, list(rows.values())
