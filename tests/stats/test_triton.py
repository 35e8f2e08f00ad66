"""The fused path: which calls it takes, its kernels in the interpreter, and their compilation for devices elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnmon.errors import AttnmonError
from attnmon.stats.api import choose_backend, resolve_backend
from attnmon.stats.fused import host
from attnmon.stats.settings import Settings
from tests.helpers import draw_call
from tests.stats.oracle import as_call

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = "tests/stats/triton_interpreted.py"
GROUPS = ("kinds", "random", "edges", "other")
QUICK = ("test_packed_documents", "test_every_kind_of_mask[3]", "test_every_kind_of_padding[2]", "test_random_calls[1]")


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([f"{INTERPRETED}::{name}" for name in QUICK], id="quick"),
        *(pytest.param(["-m", f"group_{name}", INTERPRETED], id=name, marks=pytest.mark.slow) for name in GROUPS),
    ],
)
def test_kernels_in_the_interpreter(chosen):
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
            "-c", "tests/stats/triton_interpreted.ini", "--rootdir", ".", *chosen,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout.splitlines()[-1]), done.stdout[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.fixture
def _compiler():
    if host.interpreted():
        pytest.fail("TRITON_INTERPRET is set: kernels cannot be compiled in this process")


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("bf16 D64 causal", "sm_80"),
        ("bf16 D64 causal", "sm_90"),
        ("bf16 D64 causal", "gfx942"),
        ("fp32 all at once", "sm_90"),
        ("bf16 D192 Dv128 causal", "sm_90"),
    ],
)
def test_kernels_compile_without_a_device(name, target):
    from benchmarks import aot

    (case,) = (case for case in aot.CASES if case.name == name)
    kernels = []
    for launch in aot.launches_of(case, target):
        usage = aot.compiled(launch, target)
        kernels.append(launch.kernel.__name__)
        assert usage["spilled_bytes"] == 0, (launch.kernel.__name__, usage)
        assert usage["registers"] > 0
        assert usage["shared_bytes"] <= (64 if target == "gfx942" else 99) * 1024
    assert kernels == ["select", "merge", "spread", "finish"]


def test_calls_that_the_kernels_do_not_take():
    settings = Settings.create()
    call = as_call(draw_call(3, q_len=9, k_len=9, dtype=torch.float32, mask="float", packed=False))
    assert host.unsupported(call, settings) is None
    logits = torch.zeros(1, 1, 2, 2)
    refused = {
        "logits without queries": replace(call, logits=logits),
        "float64": replace(call, key=call.key.double()),
        "attn_mask of torch.float64": replace(call, attn_mask=call.attn_mask.double()),
        "tokens of torch.float64": replace(call, value=call.value.double()),
        "score_mod": replace(call, score_mod=lambda score, b, h, q, kv: score),
        "mask_mod": replace(call, mask_mod=lambda b, h, q, kv: q >= kv),
        "normalizer": replace(call, weights=logits),
        "head_dim 512": replace(call, head_dim=512),
    }
    for reason, other in refused.items():
        assert reason in str(host.unsupported(other, settings))
    assert "top_n 65" in str(host.unsupported(call, Settings.create(top_n=65)))
    assert host.unsupported(replace(call, value=call.value.double()), Settings.create(metrics="entropy")) is None


def test_the_choice_of_a_backend(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_backend("auto") == resolve_backend("auto", cpu) == resolve_backend("torch", cuda) == "torch"
    assert resolve_backend("auto", cuda) == resolve_backend("triton", cuda) == "triton"
    with pytest.raises(AttnmonError, match=r"backend='triton' cannot run: .* on 'cpu'.*backend='auto' or 'torch'"):
        resolve_backend("triton", cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AttnmonError, match="no CUDA or ROCm device"):
        resolve_backend("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("triton", cpu) == resolve_backend("triton") == "triton"
    call = as_call(draw_call(3, q_len=9, k_len=9, dtype=torch.float32))
    assert choose_backend("auto", call, Settings.create()) == "torch"
    monkeypatch.setattr(host, "_has_triton", lambda: False)
    assert resolve_backend("auto", cuda) == "torch"
    with pytest.raises(AttnmonError, match=r"pip install 'attnmon\[triton\]'"):
        resolve_backend("triton", cuda)


@pytest.mark.parametrize("heads", [1, 4, 48, 500])
@pytest.mark.parametrize("num_keys", [1, 100, 1024, 8192, 10**6])
def test_splits_fill_the_device_and_no_more(heads, num_keys):
    splits = host.choose_splits(heads, num_keys, 132)
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= 32
    assert splits == 1 or num_keys / splits >= 256
    assert splits == 1 or heads * splits < 2 * 4 * 132
