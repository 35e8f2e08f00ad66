"""Tests see NaN where attnmon reads what it never wrote (``tests/uninitialized.py``)."""

import re
from pathlib import Path

import pytest
import torch

import attnmon
from attnmon.stats.streaming import products, softmax_rows
from tests.uninitialized import EMPTY, FILLED_TORCH

PACKAGE = Path(attnmon.__file__).parent


def test_scratch_buffers_come_filled_with_nan():
    like = torch.zeros(1)
    first = softmax_rows.scratch("of a test", (3, 4), like)
    assert first.isnan().all()
    first.zero_()
    assert softmax_rows.scratch("of a test", (2, 4), like).isnan().all()
    assert softmax_rows.scratch("of a test", (2, 4), like.long()).dtype == torch.int64


def test_empty_tensors_are_filled_for_attnmon_alone():
    assert products.torch is FILLED_TORCH
    assert products.torch.empty(5, dtype=torch.float16).isnan().all()
    assert products.torch.empty_like(torch.zeros(5)).isnan().all()
    assert products.torch.empty(5, dtype=torch.int32).shape == (5,)
    names = {"__name__": "attnmon.some.module", "tensor": torch.zeros(2, dtype=torch.float64)}
    assert eval("tensor.new_empty(3)", names).isnan().all()
    assert isinstance(torch.empty, type(torch.zeros))


def test_every_module_that_makes_empty_tensors_is_known():
    found = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\btorch\.empty(_like|_strided)?\(", path.read_text())
    }
    assert found == EMPTY


@pytest.mark.parametrize("name", sorted(EMPTY))
def test_a_known_module_names_torch_so(name):
    text = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").read_text()
    assert re.search(r"^import torch$", text, re.M)
