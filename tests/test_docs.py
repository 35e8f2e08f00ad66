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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["docs/design.md", "CONTRIBUTING.md"])
def test_files_named_in_pages_for_contributors_exist(name):
    text = (ROOT / name).read_text()
    named = set(re.findall(r"`((?:attnmon|tests|docs|benchmarks|\.ci)/[\w./]*|[\w.]+\.(?:toml|txt|md))`", text))
    assert "docs/definitions.md" in named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_source_file_that_the_design_names_exists():
    there = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for part in ("attnmon", "tests")
        for path in ROOT.glob(f"{part}/**/*.py")
    ]
    named = set(re.findall(r"[\w/]*\w\.py\b", (ROOT / "docs/design.md").read_text()))
    assert "capture/hooks.py" in named, "the drawings name files by the end of their paths"
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)] == []


def test_the_design_names_every_part_of_the_package():
    text = (ROOT / "docs/design.md").read_text()
    parts = [path for path in (ROOT / "attnmon").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    parts += [path.parent for path in (ROOT / "attnmon").glob("*/*/__init__.py")]
    names = [path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "") for path in parts]
    assert [name for name in sorted(names) if f"`{name}" not in text] == []


def test_every_command_is_in_the_readme():
    assert [command.name for command in COMMANDS if f"attnmon {command.name}" not in README] == []


WRITTEN = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "constraints.txt", "Makefile"]
WRITTEN += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_names_a_registry_or_a_home(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"index-url|find-links|pypi\.org|/root/|/home/|file://", text)


def test_the_version_is_in_the_changelog():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
