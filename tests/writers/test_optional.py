import subprocess
import sys
from unittest.mock import Mock

import pytest

from attnmon.errors import MissingExtra
from attnmon.writers import TensorBoardWriter, render_heads
from tests.writers.records import grid


def test_importing_writers_imports_no_optional_package():
    optional = ("tensorboard", "PIL", "rich", "matplotlib")
    code = f"import sys, attnmon.writers; print([name for name in {optional} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_without_tensorboard(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"'tensorboard'.*attnmon\[tensorboard\]"):
        TensorBoardWriter(tmp_path)
    TensorBoardWriter(summary_writer=Mock(), images_every=None)


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"'pillow'.*attnmon\[tensorboard\]"):
        TensorBoardWriter(summary_writer=Mock())
    with pytest.raises(MissingExtra, match="pillow"):
        render_heads(grid(1, 1, ["entropy"]), "entropy")
    TensorBoardWriter(summary_writer=Mock(), images_every=None)
