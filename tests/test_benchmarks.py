"""What benchmarks measure is what they say: their own arithmetic, on sizes of a test."""

import math

import pytest
import torch

from attnmon.stats import attention_stats
from benchmarks import accuracy, gpu, kernel


def test_the_dense_way_computes_the_same_metrics():
    q, k, v = torch.randn(3, 2, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    dense = kernel.dense(q, k[:, :1], v[:, :1], top_n=4)
    exact = attention_stats(q, k[:, :1], v[:, :1], is_causal=True, top_n=4)
    per_row = {"entropy", "logit_std", "max_prob", "top_mass", "first_mass", "max_logit"}
    for name in per_row:
        torch.testing.assert_close(dense[name], exact[name], rtol=1e-4, atol=1e-6)
    # power iteration comes from below and is not done after ten steps
    assert bool((dense["jacobian"] <= exact["jacobian"] * 1.0001).all())
    assert bool((dense["jacobian"] > exact["jacobian"] * 0.9).all())
    # rows with n <= N enter its mean of distances as zeros, as they do in ours
    torch.testing.assert_close(dense["distance"], exact["distance"], rtol=1e-3, atol=1e-4)
    assert set(dense) | {"effective_temperature"} == set(exact)


def test_the_exponent_is_that_of_a_power_law():
    def result(length, seconds):
        return {"length": length, "seconds": {"reducer": {"median": seconds}}}

    results = [result(n, 3e-6 * n**1.25) for n in (512, 1024, 4096)]
    assert kernel.exponent(results) == pytest.approx(1.25)
    assert kernel.exponent([*results, result(64, 1.0)], least=512) == pytest.approx(1.25)
    assert kernel.exponent(results[:1]) is None
    assert kernel.exponent(results, "dense") is None


def test_peak_bytes_counts_tensors_alive_at_once():
    def run():
        a = torch.empty(1000)  # 4000 bytes
        b = a + 1.0  # 8000
        view = b.view(10, 100)
        del a, b
        return view * 2.0  # 8000 again

    assert kernel.peak_bytes(run, "cpu", ()) == 8000


def test_peak_bytes_leaves_out_what_was_there_before():
    given = torch.ones(1000)
    assert kernel.peak_bytes(lambda: given[10:].detach() + 1.0, "cpu", [given]) == 3960


def test_errors_are_relative_and_nan_must_agree():
    one = torch.tensor([1.0, math.nan, 0.0])
    assert accuracy.error(one, one, "entropy") == 0.0
    assert accuracy.error(torch.tensor([1.5]), torch.tensor([1.0]), "entropy") == 0.5
    assert accuracy.error(torch.tensor([1.5]), torch.tensor([3.0]), "separability") == 1.5
    assert accuracy.error(one, torch.zeros(3), "entropy") == math.inf
    assert accuracy.error(torch.tensor([math.nan]), torch.tensor([math.nan]), "entropy") is None


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a CUDA device")
    with pytest.raises(SystemExit, match="not yet measured on a GPU"):
        gpu.run()


@pytest.mark.parametrize("mask", gpu._MASKS)
def test_calls_of_the_gpu_script(mask):
    for dtype, length in ((torch.float32, 40), (torch.bfloat16, 70)):
        result = gpu.compare(mask, gpu.SHAPES[5], dtype, length, "cpu", "torch")
        assert result["counts_agree"]
        assert max(error for error in result["errors"].values() if error is not None) < 1e-4, result


def test_steps_of_the_gpu_script():
    sizes = {"layers": 2, "dim": 32, "heads": 2, "length": 24, "batch": 2, "vocab": 50}
    result = gpu.training("eager", "cpu", **sizes, repeats=2, warmup=1)
    assert result["ratio"]["median"] > 0
    assert len(result["samples"]["on"]) == 2
    parts = gpu.parts("cpu", "torch")
    assert {"accuracy", "correctness", "nothing waits", "CUDA graph", "copy"} <= set(parts)
    records = [
        {"part": "copy", "result": 4e12},
        {"part": "bandwidth L 8192", "result": {**gpu.bandwidth(64, 2, "cpu", "torch", 1), "bytes_per_second": 2e12}},
        {"part": "step, eager", "result": result},
        {"part": "CUDA graph", "error": "RuntimeError: no"},
        {"part": "step, compiled", "skipped": "after 460 s"},
        {"part": "correctness", "result": [gpu.compare("causal", gpu.SHAPES[0], torch.float32, 30, "cpu", "torch")]},
    ]
    lines = gpu.summary(records)
    assert lines[0] == "FAILED CUDA graph: RuntimeError: no"
    assert any("50% of a copy" in line for line in lines)
    assert any(line.startswith("step, eager: on / off") for line in lines)
