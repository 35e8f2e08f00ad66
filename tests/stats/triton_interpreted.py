"""The fused kernels in triton's interpreter, against the reference; run by ``test_triton.py`` in processes of its own.

The interpreter has to be asked for before triton is imported, so these tests cannot share a process with others.
It costs time by operation, not by element: ``big_tiles`` takes all rows of a call into one program.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnmon
from attnmon.errors import UnsupportedAttention
from attnmon.stats import api, attention_stats
from attnmon.stats.directions import direction_table
from attnmon.stats.fused import host
from attnmon.stats.fused import launch as triton_kernel
from attnmon.stats.packing import Packing
from attnmon.stats.plan import make_plan
from attnmon.stats.settings import Settings
from tests.helpers import MASK_KINDS, PADDING_KINDS, WINDOW_KINDS, call_id, draw_call
from tests.stats import test_streaming as streaming_cases
from tests.stats.oracle import SETTINGS, as_call, assert_expected, counts_of, expect, metrics_of

PLAIN = streaming_cases.PLAIN
DTYPES = streaming_cases.DTYPES
PRODUCTION_TILES = host.tiles


def setup_module():
    assert host.interpreted(), "run by test_triton.py, with TRITON_INTERPRET=1"
    torch.set_num_threads(1)


def big_tiles(num_rows, head_dim, width, *rest):
    cut = PRODUCTION_TILES(num_rows, head_dim, width, *rest)
    rows = min(256, max(16, host.power_of_two(num_rows)))
    whole = host.power_of_two(width)
    return replace(
        cut, BM=rows, BR=256, BF=256, BD=max(16, host.power_of_two(head_dim)), BE=max(16, whole), BG=whole
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _big_tiles(monkeypatch):
    monkeypatch.setattr(host, "tiles", big_tiles)


@pytest.fixture
def splits(monkeypatch):
    """Cuts the keys into so many parts."""

    def set_splits(number):
        monkeypatch.setattr(host, "choose_splits", lambda *_: number)

    return set_splits


def measure(call, **options):
    """The packed matrix of the kernels; every row unless the options say otherwise."""
    chosen = {"rows": None, "sequences": None, "metrics": metrics_of(call)}
    chosen.update({name: given for name, given in call.items() if name in SETTINGS})
    chosen.update(options)
    prepared, settings = as_call(call), Settings.create(**chosen)
    packing = Packing(settings.metrics)
    plan = make_plan(prepared, settings)
    return packing, api.measure(prepared, settings, plan, packing, "triton").numpy()


def check(call):
    """Metrics and row counts of a call against the reference."""
    expected, context = expect(call), call_id(call)
    packing, matrix = measure(call)
    stats = {name: torch.from_numpy(value) for name, value in packing.values(matrix).items()}
    assert_expected(stats, expected, 1e-5 if call["query"].dtype == torch.float32 else 1e-4, context)
    assert counts_of(packing, matrix) == expected.counts, context
    return expected


def group(name):
    """Marks tests that run in one process."""
    return getattr(pytest.mark, f"group_{name}")


# ---- agreement with the reference


@group("kinds")
@pytest.mark.parametrize("number", range(len(MASK_KINDS)))
def test_every_kind_of_mask(splits, number):
    splits((1, 2, 4)[number % 3])
    dtype = DTYPES[number % 3]
    check(draw_call(1000 + number, q_len=(5, 17, 70)[number % 3], mask=MASK_KINDS[number], dtype=dtype, batch=2))


@group("kinds")
@pytest.mark.parametrize("number", range(1, len(PADDING_KINDS)))
def test_every_kind_of_padding(number):
    options = {"padding": PADDING_KINDS[number], "packed": False, "mask": "none", "is_causal": number % 2 == 0}
    check(draw_call(2000 + number, q_len=19, k_len=19, dtype=DTYPES[number % 3], batch=2, **options))


@group("kinds")
@pytest.mark.parametrize("number", range(1, len(WINDOW_KINDS)))
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_kind_of_window(splits, number, is_causal):
    splits(2)
    options = {**PLAIN, "window_kind": WINDOW_KINDS[number], "is_causal": is_causal}
    check(draw_call(3000 + number, **options, q_len=70, k_len=70, batch=1, heads=2, kv_heads=1))


@group("kinds")
def test_packed_documents(splits):
    splits(2)
    options = {**PLAIN, "packed": True, "is_causal": True}
    call = draw_call(5, **options, q_len=80, k_len=80, heads=2, kv_heads=1, top_n=4)
    call["cu_seqlens"] = torch.tensor([0, 1, 30, 67, 80], dtype=torch.int32)
    check(call)
    call["cu_seqlens"] = torch.tensor([0, 30, 67], dtype=torch.int32)  # the rest is padding
    check(call)


@group("kinds")
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "parts"),
    [(1, 4, 2, 1), (15, 4, 1, 1), (63, 2, 2, 2), (111, 2, 1, 4), (129, 2, 1, 2), (1000, 2, 1, 4)],
)
def test_ragged_lengths(splits, length, heads, kv_heads, parts):
    splits(parts)
    dtype = DTYPES[length % 3]
    options = {**PLAIN, "is_causal": length < 1000, "dtype": dtype, "with_sinks": length % 2 == 1}
    q_len = min(length, 129)
    if length == 1000:
        q_len = 5
    check(draw_call(length, **options, batch=1, heads=heads, kv_heads=kv_heads, q_len=q_len, k_len=length, top_n=16))


@group("kinds")
@pytest.mark.parametrize("top_n", [1, 2, 8, 9, 20])
def test_rows_about_as_long_as_the_selection(splits, top_n):
    """Causal rows: n = 1, 2, N - 1, N, N + 1 and on, with the kept list full and not."""
    splits(2)
    options = {**PLAIN, "is_causal": True}
    check(draw_call(top_n, **options, batch=1, heads=2, kv_heads=1, q_len=top_n + 12, k_len=top_n + 12, top_n=top_n))


@group("kinds")
@pytest.mark.parametrize("head_dim", [16, 80, 96, 192, 256])
def test_head_dimensions(head_dim):
    dtype = DTYPES[head_dim // 16 % 3]
    options = {**PLAIN, "dtype": dtype, "is_causal": True, "strided": True}
    check(draw_call(head_dim, **options, q_len=21, k_len=21, batch=1, head_dim=head_dim, value_dim=24 + head_dim // 2))


@group("random")
@pytest.mark.parametrize("seed", range(12))
def test_random_calls(splits, seed):
    splits((1, 2, 4, 8)[seed % 4])
    length = (None, 3, 17, 40)[seed % 4]
    check(draw_call(seed) if length is None else draw_call(seed, q_len=length))


@group("random")
@pytest.mark.parametrize("tokens", ["value_raw", "hidden"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_other_tokens(tokens, dtype):
    options = {**PLAIN, "dtype": dtype}
    call = draw_call(7, **options, q_len=7, k_len=40, batch=2, heads=4, kv_heads=2, top_n=4, tokens=tokens)
    if tokens == "hidden":
        call["hidden"] = torch.randn(2, 40, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
        del call["value"]
    check(call)


@group("random")
def test_queries_and_keys_of_different_dtypes():
    call = draw_call(8, **PLAIN, q_len=7, k_len=20, batch=1, heads=2, kv_heads=1, top_n=4)
    call["query"] = call["query"].bfloat16().float()  # the oracle's tolerance is float32's
    for key in (torch.bfloat16, torch.float16):
        check({**call, "key": call["key"].to(key)})


# ---- adversarial rows: those of the streaming implementation


@group("edges")
@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (streaming_cases.test_ties_select_the_lowest_index, ()),
        (streaming_cases.test_repeated_keys, ()),
        (streaming_cases.test_identical_opposite_and_zero_value_vectors, ()),
        (streaming_cases.test_rows_whose_least_excess_is_not_negative, ()),
        (streaming_cases.test_softcap_past_saturation, ()),
        *((streaming_cases.test_one_hot_rows_keep_their_relative_accuracy, (gap, n)) for gap, n in
          ((5.0, 2), (60.0, 40), (30.0, 250))),
        *((streaming_cases.test_an_outsider_almost_at_s, (near, masked, where)) for near, masked, where in
          ((1e-1, False, "tail"), (1e-3, False, "tail"), (1e-5, True, "tail"), (1e-3, True, "near"))),
        *((streaming_cases.test_a_selected_key_and_an_outsider_almost_at_s, (near, nearer, where))
          for near, nearer, where in
          ((1e-1, 0.99, "near"), (1e-3, 0.99, "tail"), (1e-1, 1.01, "tail"), (1e-3, 1.01, "near"))),
        *((streaming_cases.test_sinks_of_any_size, (lead, n)) for lead, n in
          ((-math.inf, 40), (-60.0, 1), (0.0, 40), (15.0, 40), (50.0, 1), (75.0, 40))),
    ],
)  # fmt: skip
def test_edge_cases(monkeypatch, case, arguments):
    monkeypatch.setattr(streaming_cases, "check", check)
    case(*arguments)


@group("edges")
@pytest.mark.parametrize("ratio", [0.5, 4.99, 5.01, 40.0, 3000.0])
def test_steps_of_any_size(monkeypatch, splits, ratio):
    """Around ``host.LARGE_STEP``, and where moved weights overflow."""
    assert host.LARGE_STEP == 5.0
    splits(2)
    monkeypatch.setattr(streaming_cases, "check", check)
    streaming_cases.test_steps_around_the_expm1_limit(ratio, 2.0 if ratio in (4.99, 40.0) else None)


@group("edges")
def test_logits_of_ten_thousand():
    call = draw_call(3, **PLAIN, batch=1, heads=2, kv_heads=1, q_len=6, k_len=70, head_dim=16, top_n=4)
    call["query"] = call["query"] * (1e4 / float((call["query"] @ call["key"].mT).abs().max() / 4.0))
    check(call)
    # a common offset that the softmax does not see, and small differences between the keys
    call["query"], call["key"] = torch.full_like(call["query"], 50.0), torch.full_like(call["key"], 50.0)
    call["key"] += torch.randint(0, 8, call["key"].shape, generator=torch.Generator().manual_seed(0)) * 2.0**-7
    check(call)


# ---- what must not matter


@group("other")
def test_garbage_in_masked_keys():
    call = draw_call(11, **PLAIN, batch=2, heads=2, kv_heads=1, q_len=9, k_len=40, top_n=4)
    for name in ("query", "key", "value"):
        call[name] = call[name].clone()
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[0, 30:] = padding[1, :3] = True
    call["key_padding_mask"] = padding
    _, clean = measure(call)
    for garbage in (math.nan, math.inf, -3e38):
        for name in ("key", "value"):
            call[name][padding[:, None].expand(-1, 1, -1)] = garbage
        _, dirty = measure(call)
        assert np.array_equal(clean, dirty)


@group("other")
def test_rows_that_are_not_finite_are_counted():
    call = draw_call(12, **{**PLAIN, "is_causal": True}, batch=2, heads=2, kv_heads=2, q_len=20, k_len=20, top_n=4)
    call["key"], call["value"] = call["key"].clone(), call["value"].clone()
    call["key"][0, 0, 11] = math.nan
    call["key"][1, 1, 15] = math.inf
    check(call)


@group("other")
def test_values_that_are_not_finite_leave_out_the_rows_that_see_them():
    call = draw_call(12, **{**PLAIN, "is_causal": True}, batch=1, heads=2, kv_heads=2, q_len=20, k_len=20, top_n=4)
    packing, clean = measure(call)
    call["value"] = call["value"].clone()
    call["value"][0, 0, 11] = math.nan
    call["value"][0, 1, 15] = math.inf
    _, dirty = measure(call)
    places = {name: column for column, name in enumerate(packing.columns)}
    for name in packing.means:
        number = clean[places[name] + 1] - dirty[places[name] + 1]
        assert number.tolist() == ([9, 5] if name in ("separability", "distance") else [0, 0]), name
    assert np.isfinite(dirty[: packing.num_sums]).all()


@group("other")
def test_scratch_filled_with_nan(monkeypatch, splits):
    splits(4)
    calls = [draw_call(seed, q_len=20, batch=2) for seed in (4, 9)]
    calls.append(draw_call(5, **{**PLAIN, "fd_epsilon": 10.0, "scale": 1.0}, batch=1, q_len=5, k_len=300))
    before = [measure(call)[1] for call in calls]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(math.nan))
    for call, expected in zip(calls, before, strict=True):
        assert np.array_equal(measure(call)[1], expected), call_id(call)


@group("other")
def test_many_launches_splits_and_tiles_give_the_same(monkeypatch, splits):
    call = draw_call(12, **PLAIN, batch=2, heads=2, kv_heads=1, q_len=12, k_len=75, head_dim=80)
    call["key_padding_mask"] = torch.arange(75)[None] < torch.tensor([[0], [9]])
    packing, whole = measure(call)
    places = {name: column for column, name in enumerate(packing.columns)}
    counts = [0, 1, 2, 3, *(places[name] + 1 for name in packing.means)]

    def agrees():
        _, matrix = measure(call)
        assert np.array_equal(matrix[counts], whole[counts])
        np.testing.assert_allclose(matrix, whole, rtol=2e-6, atol=1e-6)

    for parts in (2, 8):
        splits(parts)
        agrees()
    splits(2)
    monkeypatch.setattr(host, "SCRATCH_BYTES", 20_000)
    agrees()
    monkeypatch.setattr(host, "SCRATCH_BYTES", 1 << 26)
    monkeypatch.setattr(host, "tiles", lambda *a: replace(PRODUCTION_TILES(*a), BD=16, BE=16, BG=4))  # many chunks
    agrees()
    monkeypatch.setattr(host, "tiles", PRODUCTION_TILES)
    agrees()


@group("other")
def test_sampled_rows_are_those_of_the_streaming_path():
    call = draw_call(13, **{**PLAIN, "padding": "left"}, batch=5, heads=2, kv_heads=1, q_len=60, k_len=60)
    settings = Settings.create(rows=7, sequences=3)
    prepared, packing = as_call(call), Packing(settings.metrics)
    for draw in (0, 3):
        plan = make_plan(prepared, settings, draw)
        fused_matrix = api.measure(prepared, settings, plan, packing, "triton")
        streamed = api.measure(prepared, settings, plan, packing, "torch", dtype=torch.float64)
        torch.testing.assert_close(fused_matrix, streamed, rtol=1e-5, atol=1e-5)


# ---- the operator


def _operator_arguments(rows=4):
    call = draw_call(3, **{**PLAIN, "is_causal": True}, batch=2, heads=2, kv_heads=1, q_len=9, k_len=9)
    settings = Settings.create(rows=rows, top_n=2)
    prepared, packing = as_call(call), Packing(settings.metrics)
    plan = make_plan(prepared, settings)
    accumulator = torch.zeros(packing.num_columns, 2, dtype=torch.float64)
    accumulator[packing.num_sums :] = -math.inf
    live = None if plan.live is None else plan.live.contiguous()
    return packing, (
        accumulator, prepared.query, prepared.key, prepared.value, host.row_table(prepared, plan), live, None, None,
        None, direction_table(), prepared.scale, 0.0, prepared.tau, 0.1, 0, 1, 2, True, ",".join(packing.metrics),
    )  # fmt: skip


@group("other")
def test_the_operator_is_well_formed():
    _, arguments = _operator_arguments()
    torch.library.opcheck(triton_kernel.reduce_rows, arguments)


@group("other")
def test_the_operator_adds_to_what_is_there():
    packing, arguments = _operator_arguments()
    triton_kernel.reduce_rows(*arguments)
    once = arguments[0].clone()
    triton_kernel.reduce_rows(*arguments)
    torch.testing.assert_close(arguments[0][: packing.num_sums], 2 * once[: packing.num_sums], rtol=0.0, atol=0.0)
    assert torch.equal(arguments[0][packing.num_sums :], once[packing.num_sums :])


@group("other")
def test_the_operator_in_a_compiled_graph():
    _, arguments = _operator_arguments()
    triton_kernel.reduce_rows(*arguments)
    _, again = _operator_arguments()

    def step(accumulator, scale):
        torch.ops.attnmon.reduce_rows(accumulator, *again[1:])
        return accumulator * scale

    result = torch.compile(step, fullgraph=True, backend="aot_eager")(again[0], 2.0)
    assert torch.equal(again[0], arguments[0])
    assert torch.equal(result, arguments[0] * 2.0)


@group("other")
def test_the_public_functions_take_the_backend():
    call = draw_call(3, **{**PLAIN, "is_causal": True}, batch=2, heads=2, kv_heads=1, q_len=9, k_len=9, top_n=2)
    streamed = attention_stats(**call, backend="torch")
    kernels = attention_stats(**call, backend="triton")
    for name, value in streamed.items():
        torch.testing.assert_close(kernels[name], value, rtol=1e-5, atol=1e-6)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = attnmon.watch(torch.nn.ModuleDict({"attention": layer}), backend="triton", on_error="raise", top_n=2)
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    with monitor.step():
        layer(x, x, x, need_weights=False)
    snapshot = monitor.flush()
    monitor.close()
    assert snapshot["entropy"]["attention"].shape == (2,)
    assert bool(np.isfinite(snapshot["separability"]["attention"]).all())


@group("other")
def test_calls_that_the_kernels_do_not_take():
    settings = Settings.create()
    call = as_call(draw_call(3, **PLAIN, q_len=9, k_len=9))
    assert api.choose_backend("triton", call, settings) == "triton"
    assert api.choose_backend("auto", call, settings) == "torch"  # on the CPU, interpreter or not
    double = replace(call, query=call.query.double())
    with pytest.raises(UnsupportedAttention, match=r"query of torch\.float64"):
        api.choose_backend("triton", double, settings)
