"""The README says what the code does: its metric table, its quickstart, its files and its commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnmon.commands.cli import COMMANDS
from attnmon.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def metric_table():
    """The table of the README as it follows from ``attnmon.metrics``."""
    units = {"1": "-"}
    lines = ["| metric | of a row | unit | range | head's value | source |", "|---|---|---|---|---|---|"]
    for metric in METRICS.values():
        merge = {"mean": "mean", "max": "maximum", "inverse_mean": f"1 / mean {metric.of}"}[metric.merge]
        cells = (f"`{metric.name}`", metric.formula, units.get(metric.unit, metric.unit), metric.value_range, merge)
        lines.append("| " + " | ".join((*(cell.replace("|", "\\|") for cell in cells), metric.source)) + " |")
    return "\n".join(lines)


def test_the_metric_table_is_that_of_the_code():
    written = re.search(r"<!-- metrics -->\n(.*?)\n<!-- /metrics -->", README, re.S)
    assert written
    assert written[1] == metric_table(), f"the README should have:\n{metric_table()}"


def code_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_quickstart_runs_and_prints_what_it_says(tmp_path):
    pytest.importorskip("transformers")
    code, said = re.search(r"```python\n([^`]*GPT2[^`]*)```\n.*?```text\n(.*?)```", README, re.S).groups()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

    def shape(text):
        return [re.sub(r"[\d.e+-]+", "#", line).split() for line in text.splitlines()]  # last digits vary by machine

    assert shape(done.stdout) == shape(said), done.stdout


@pytest.mark.parametrize("number", range(len(code_blocks("python"))))
def test_python_in_the_readme_compiles(number):
    compile(code_blocks("python")[number], "README.md", "exec")


def test_files_named_in_the_readme_exist():
    named = set(re.findall(r"`((?:attnmon|examples|benchmarks|tests|\.ci)/[\w./]*|[\w.]+\.(?:toml|txt|md))`", README))
    assert "attnmon/stats/reference.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_command_is_in_the_readme():
    assert [command.name for command in COMMANDS if f"attnmon {command.name}" not in README] == []


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt", "Makefile"])
def test_nothing_names_a_registry_or_a_home(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"index-url|find-links|pypi\.org|/root/|/home/|file://", text)


def test_the_version_is_in_the_changelog():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
