"""The examples run as they stand, from an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONAL = {"lightning_gpt": ("pytorch_lightning", "transformers", "tensorboard")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem) for path in EXAMPLES],
)
def test_example_runs(script, tmp_path):
    for package in OPTIONAL.get(script.stem, ()):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "alerts: 0" in done.stdout
    assert "AttnmonWarning" not in done.stderr


def test_the_readme_names_every_example():
    readme = (ROOT / "README.md").read_text()
    assert [script.name for script in EXAMPLES if f"examples/{script.name}" not in readme] == []
