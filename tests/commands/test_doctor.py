"""``attnmon doctor``: coverage of a model that a user names."""

import pytest

from attnmon.commands.cli import main

MODULE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x)[0]


class Never(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused_attention = Block(), nn.MultiheadAttention(16, 2)

    def forward(self, x):
        return self.used(x)


def bare():
    return Block()


def with_inputs():
    return Block(), torch.randn(2, 5, 16)


def with_keywords():
    return Block(), {"x": torch.randn(2, 5, 16)}


def unused():
    return Never(), (torch.randn(2, 5, 16),)


def fails():
    return Block(), torch.randn(2, 5, 17)


def no_attention():
    return nn.Linear(2, 2)


def no_model():
    return 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "doctored.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "doctored"
    import sys

    sys.modules.pop("doctored", None)


@pytest.mark.parametrize("factory", ["with_inputs", "with_keywords"])
def test_a_forward_shows_what_is_captured(module, factory, capsys):
    assert main(["doctor", f"{module}:{factory}"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["attn", "self", "2", "multi_head_attention_forward", "torch", "captured"]
    ]


def test_without_inputs_everything_waits(module, capsys):
    assert main(["doctor", f"{module}:bare"]) == 0
    out = capsys.readouterr().out
    assert "waiting" in out
    assert "(model, inputs)" in out


def test_a_module_that_is_never_called_is_reported(module, capsys):
    assert main(["doctor", f"{module}:unused"]) == 1
    out = capsys.readouterr().out
    assert "unused_attention" in out
    assert "skipped: it made no attention call" in out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("doctored", "MODULE:FACTORY"),
        ("doctored:nothing", "nothing"),
        ("nowhere_at_all:build", "nowhere_at_all"),
        ("doctored:fails", "failed"),
        ("doctored:no_attention", "found no attention"),
        ("doctored:no_model", "torch.nn.Module"),
    ],
)
def test_mistakes_are_one_line_and_status_2(module, target, message, capsys):
    assert main(["doctor", target]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
