"""``attnmon paper --from-run``: what a monitored run wrote, drawn."""

import csv
import re

import numpy as np
import pytest

from attnmon.commands.cli import main
from attnmon.types import Snapshot
from attnmon.writers import JsonlWriter

pytest.importorskip("matplotlib")

MODULES = {"h.0.attn": 2, "h.1.attn": 3}
METRICS = ("separability", "jacobian", "jacobian_max", "jacobian_fd")


def snapshot(step, metrics=METRICS, hole=None):
    """Values that tell step, module and head; ``hole`` is NaN."""

    def heads(number, module, count):
        values = [0.1 * (number + 1) + 0.001 * step + 0.01 * head for head in range(count)]
        return np.array([np.nan if (module, head) == hole else value for head, value in enumerate(values)], np.float32)

    counts = {module: np.full(count, 7) for module, count in MODULES.items()}
    values = {
        metric: {module: heads(number, module, count) for module, count in MODULES.items()}
        for number, metric in enumerate(metrics)
    }
    return Snapshot(
        step=step, modules=tuple(MODULES), values=values, rows=counts, excluded=counts, settings={"top_n": 16}
    )


def write(folder, snapshots):
    writer = JsonlWriter(folder)
    for one in snapshots:
        writer.write_snapshot(one)
    writer.close()


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_head_of_every_step_is_drawn(tmp_path, capsys):
    write(tmp_path / "run", [snapshot(step, hole=("h.1.attn", 2) if step == 5 else None) for step in (0, 5, 10)])
    assert main(["paper", "--from-run", str(tmp_path / "run")]) == 0
    out = tmp_path / "run" / "paper"
    assert str(out / "run.html") in capsys.readouterr().out
    rows = table(out / "run-separability.csv")
    assert len(rows) == 3 * 5
    first = next(row for row in rows if (row["step"], row["module"], row["head"]) == ("10", "h.1.attn", "1"))
    assert float(first["separability"]) == pytest.approx(0.1 + 0.01 + 0.01)
    assert next(row for row in rows if row["step"] == "5" and row["head"] == "2")["separability"] == ""
    assert list(table(out / "run-sensitivity.csv")[0]) == ["step", "module", "head", *METRICS[1:]]
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"run-{metric}.{kind}" for metric in METRICS for kind in ("png", "svg")
    }
    page = (out / "run.html").read_text()
    assert page.count("data:image/svg+xml") == 4
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "at N = 16" in page
    assert "no quality score" in page


def test_a_run_below_the_folder_is_found_and_out_can_be_chosen(tmp_path):
    write(tmp_path / "logs" / "version_0", [snapshot(0, metrics=("jacobian",))])
    assert main(["paper", "--from-run", str(tmp_path / "logs"), "--out", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "logs" / "paper").exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"figures", "run-sensitivity.csv", "run.html"} | (
        {"run-sensitivity.parquet"} if (tmp_path / "out" / "run-sensitivity.parquet").exists() else set()
    )


def test_a_step_that_was_written_twice_counts_as_written_last(tmp_path):
    write(tmp_path, [snapshot(3), snapshot(4)])
    write(tmp_path, [snapshot(3, hole=("h.0.attn", 0))])  # resumed from an earlier checkpoint
    assert main(["paper", "--from-run", str(tmp_path / "attnmon.jsonl"), "--out", str(tmp_path / "out")]) == 0
    rows = table(tmp_path / "out" / "run-separability.csv")
    assert [row["step"] for row in rows if (row["module"], row["head"]) == ("h.0.attn", "0")] == ["3", "4"]
    assert rows[0]["separability"] == ""


def refuse(argv, capsys):
    status = main(["paper", *argv])
    err = capsys.readouterr().err
    assert (status, err.count("\n")) == (2, 1)
    return err


def test_two_runs_are_not_mixed(tmp_path, capsys):
    for name in ("a", "b"):
        write(tmp_path / name, [snapshot(0)])
    assert "2 runs below it" in refuse(["--from-run", str(tmp_path)], capsys)
    assert not (tmp_path / "paper").exists()


def test_a_run_without_these_metrics_is_told(tmp_path, capsys):
    write(tmp_path, [snapshot(0, metrics=("entropy",))])
    said = refuse(["--from-run", str(tmp_path)], capsys)
    assert "no snapshot with jacobian, jacobian_fd, jacobian_max, separability" in said
    assert not (tmp_path / "paper").exists()


def test_a_log_of_a_newer_version_is_told(tmp_path, capsys):
    (tmp_path / "attnmon.jsonl").write_text('{"kind": "snapshot", "schema": 99}\n')
    assert "schema 99" in refuse(["--from-run", str(tmp_path)], capsys)
