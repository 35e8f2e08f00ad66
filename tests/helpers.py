"""What the tests of every implementation share: random attention calls, and how results are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

MASK_KINDS = ("none", "bool", "bool_2d", "bool_batch", "bool_head", "bool_key", "float", "float_inf", "float_min")
PADDING_KINDS = ("none", "left", "right", "left_float", "right_float")
WINDOW_KINDS = ("none", "int", "pair", "half_pair")


def slow_but(quick, values):
    """Parameters of a test, marked slow but for those in ``quick``; a tuple holds several parameters."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.slow
        )
        for value in values
    ]


def draw_call(rng: np.random.Generator | int, **overrides: Any) -> dict[str, Any]:
    """Random keyword arguments for ``attention_stats``, of any kind that it accepts.

    Args:
        rng: a generator, or a seed for one.
        overrides: fix a choice: ``batch``, ``heads``, ``kv_heads``, ``q_len``, ``k_len``, ``head_dim``,
            ``value_dim``, ``dtype``, ``strided`` (bool), ``sharpness`` (standard deviation of the logits at the
            default scale), ``mask`` (MASK_KINDS), ``padding`` (PADDING_KINDS), ``window_kind`` (WINDOW_KINDS),
            ``packed`` (bool), or an argument itself: ``is_causal``, ``scale``, ``softcap``, ``sinks``, ``top_n``,
            ``value=None``, ... Every argument of the result may be overridden.

    Returns:
        query, key, value and only those options that differ from their defaults. Two calls with the same seed and
        overrides are equal. Values of masked keys are ordinary numbers; tests of garbage put it there themselves.
    """
    rng = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(rng)
    # All choices are drawn whether overridden or not, so that an override changes nothing else.
    heads, kv_heads = (int(x) for x in rng.choice([(1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (6, 2)]))
    length, other = (int(x) for x in rng.choice([1, 2, 3, 5, 7, 16, 17, 31, 33, 63, 65], size=2))
    cross = bool(rng.random() < 0.3)
    drawn: dict[str, Any] = {
        "batch": int(rng.integers(1, 4)),
        "head_dim": int(rng.choice([4, 8, 16, 20, 64])),
        "value_dim": int(rng.choice([3, 8, 16, 24])),
        "dtype": (torch.float32, torch.float32, torch.bfloat16, torch.float16)[rng.integers(4)],
        "strided": bool(rng.random() < 0.5),
        "sharpness": float(10.0 ** rng.uniform(-1, 1)),
        "mask": str(rng.choice(MASK_KINDS, p=[0.36] + [0.08] * 8)),
        "padding": str(rng.choice(PADDING_KINDS, p=[0.6] + [0.1] * 4)),
        "window_kind": str(rng.choice(WINDOW_KINDS, p=[0.61] + [0.13] * 3)),
        "packed": bool(rng.random() < 0.12),
        "is_causal": bool(rng.random() < 0.5),
        "scale": float(rng.uniform(0.02, 1.5)) if rng.random() < 0.3 else None,
        "softcap": float(rng.uniform(0.5, 30.0)) if rng.random() < 0.25 else None,
        "with_sinks": bool(rng.random() < 0.25),
        "top_n": int(rng.choice([1, 2, 4, 16, 20])),
        "fd_epsilon": float(rng.choice([1e-3, 0.1, 10.0])),
    }
    arguments = {name: given for name, given in overrides.items() if name in _ARGUMENTS}
    choices = {name: given for name, given in overrides.items() if name not in _ARGUMENTS}
    unknown = set(choices) - set(drawn) - {"heads", "kv_heads", "q_len", "k_len"}
    assert not unknown, f"draw_call does not know {sorted(unknown)}"
    drawn.update(choices)
    heads = choices.get("heads", heads)
    kv_heads = choices.get("kv_heads", kv_heads if heads % kv_heads == 0 else 1)
    q_len = choices.get("q_len", length)
    k_len = choices.get("k_len", other if cross and not drawn["packed"] else q_len)
    batch = 1 if drawn["packed"] else drawn["batch"]

    seed = torch.Generator().manual_seed(int(rng.integers(2**31)))
    dtype, dim = drawn["dtype"], drawn["head_dim"]

    def tensor(num: int, size: int, width: int, factor: float) -> Tensor:
        shape = (batch, size, num, width) if drawn["strided"] else (batch, num, size, width)
        x = (torch.randn(shape, generator=seed) * factor).to(dtype)
        return x.transpose(1, 2) if drawn["strided"] else x

    factor = drawn["sharpness"] ** 0.5
    call: dict[str, Any] = {
        "query": tensor(heads, q_len, dim, factor),
        "key": tensor(kv_heads, k_len, dim, factor),
        "value": tensor(kv_heads, k_len, drawn["value_dim"], 1.0),
        "attn_mask": _draw_mask(drawn["mask"], rng, seed, (batch, heads, q_len, k_len), dtype),
        "is_causal": drawn["is_causal"],
        "scale": drawn["scale"],
        "softcap": drawn["softcap"],
        "sinks": torch.randn(heads, generator=seed) * 2.0 if drawn["with_sinks"] else None,
        "window": _draw_window(drawn["window_kind"], rng),
        "key_padding_mask": None if drawn["packed"] else _draw_padding(drawn["padding"], rng, batch, k_len, dtype),
        "cu_seqlens": _draw_documents(rng, q_len) if drawn["packed"] else None,
        "top_n": drawn["top_n"],
        "fd_epsilon": drawn["fd_epsilon"],
    }
    call.update(arguments)
    return {name: given for name, given in call.items() if given is not None and given is not False}


_ARGUMENTS = (
    *("query", "key", "value", "attn_mask", "is_causal", "scale", "softcap", "sinks", "window", "key_padding_mask"),
    *("cu_seqlens", "top_n", "fd_epsilon", "tokens", "metrics", "rows", "sequences", "backend"),
)


def _draw_mask(
    kind: str, rng: np.random.Generator, seed: torch.Generator, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    batch, heads, q_len, k_len = shape
    mask_shape = {
        "bool_2d": (q_len, k_len),
        "bool_batch": (batch, 1, q_len, k_len),
        "bool_head": (1, heads, q_len, k_len),
        "bool_key": (batch, 1, 1, k_len),
        "float": (1, heads, q_len, k_len),
        "float_min": (batch, 1, q_len, k_len),
    }.get(kind, shape)
    visible = torch.rand(mask_shape, generator=seed) < float(rng.choice([0.3, 0.8, 0.95]))
    bias = torch.randn(mask_shape, generator=seed).to(dtype)
    if kind == "none":
        return None
    if kind.startswith("bool"):
        return visible
    if kind == "float":  # a bias alone, no key masked
        return bias
    return bias.masked_fill(~visible, float("-inf") if kind == "float_inf" else torch.finfo(dtype).min)


def _draw_padding(kind: str, rng: np.random.Generator, batch: int, k_len: int, dtype: torch.dtype) -> Tensor | None:
    counts = torch.from_numpy(rng.integers(0, k_len, size=batch, endpoint=rng.random() < 0.1))
    if kind == "none":
        return None
    index = torch.arange(k_len)[None, :]
    padded = index < counts[:, None] if kind.startswith("left") else index >= k_len - counts[:, None]
    return torch.zeros(padded.shape, dtype=dtype).masked_fill(padded, -torch.inf) if "float" in kind else padded


def _draw_window(kind: str, rng: np.random.Generator) -> int | tuple[int | None, int | None] | None:
    left, right = (int(x) for x in rng.integers(0, 20, size=2))
    unlimited = None if rng.random() < 0.5 else -1
    half = (left, unlimited) if rng.random() < 0.5 else (unlimited, right)
    return {"none": None, "int": left + 1, "pair": (left, right), "half_pair": half}[kind]


def _draw_documents(rng: np.random.Generator, length: int) -> Tensor:
    cuts = rng.choice(np.arange(1, length), size=min(3, length - 1), replace=False) if length > 1 else []
    return torch.tensor([0, *sorted(int(cut) for cut in cuts), length], dtype=torch.int32)


def call_id(call: Mapping[str, Any]) -> str:
    """A call in one readable line, for test ids and messages."""
    query, key = call["query"], call["key"]
    parts = [
        str(query.dtype).removeprefix("torch."),
        f"B{query.shape[0]}H{query.shape[1]}/{key.shape[1]}L{query.shape[2]}x{key.shape[2]}D{query.shape[3]}",
        *([] if query.is_contiguous() else ["strided"]),
    ]
    for name, given in call.items():
        if name in ("query", "key", "value"):
            continue
        if name == "cu_seqlens":
            parts.append(f"docs{given.tolist()}")
        elif isinstance(given, Tensor):
            parts.append(f"{name}:{str(given.dtype).removeprefix('torch.')}{list(given.shape)}")
        else:
            parts.append(f"{name}={given:.3g}" if isinstance(given, float) else f"{name}={given}")
    return " ".join(parts)


def assert_stats_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    rtol: float = 1e-4,
    *,
    atol: float | Mapping[str, float] = 1e-6,
    metric_rtol: Mapping[str, float] | None = None,
    context: str = "",
) -> None:
    """Same metrics, dtype float32, shape and NaN pattern; |actual - expected| <= atol + rtol * |expected|.

    Args:
        rtol: relative tolerance of every metric that ``metric_rtol`` does not name.
        atol: absolute tolerance, one number or one a metric (others 1e-6). Equal infinities agree.
        context: put into the message, say ``call_id(call)``.

    Raises:
        AssertionError: names the worst metric and head, by error in units of its tolerance.
    """
    where = f"\n  call: {context}" if context else ""
    assert set(actual) == set(expected), f"metrics differ: {sorted(set(actual) ^ set(expected))}{where}"
    worst, message = 1.0, ""
    for name, reference in expected.items():
        got = actual[name].detach().cpu()
        assert got.dtype == torch.float32, f"{name} is {got.dtype}, not float32{where}"
        assert got.shape == reference.shape, f"{name} has shape {list(got.shape)}, not {list(reference.shape)}{where}"
        assert torch.equal(got.isnan(), reference.cpu().isnan()), (
            f"{name}: NaN where the other is not: {got.tolist()} against {reference.tolist()}{where}"
        )
        a, b = got.double(), reference.detach().cpu().double()
        absolute = atol if isinstance(atol, float) else atol.get(name, 1e-6)
        allowed = absolute + (metric_rtol or {}).get(name, rtol) * b.abs()
        error = torch.where((a == b) | b.isnan(), 0.0, (a - b).abs()) / allowed
        error = torch.where(b.isinf() & (a != b), torch.inf, error)
        if error.numel() and float(error.max()) > worst:
            worst, head = float(error.max()), int(error.argmax())
            message = (
                f"worst: {name}, head {head}: {float(a[head])!r} against {float(b[head])!r}, "
                f"relative error {float((a[head] - b[head]).abs() / b[head].abs()):.2e}, "
                f"{worst:.3g} times the tolerance{where}"
            )
    assert not message, message


def row_logits(rng, kind, n):
    """n logits of a "sharp", "tied", "one_hot" or "uniform" row, or (any other kind) of a random one."""
    z = rng.normal(size=n) * (rng.uniform(3, 30) if kind == "sharp" else rng.uniform(0.01, 3))
    if kind == "tied":
        z[rng.permutation(n)[: rng.integers(2, n + 1)]] = z.max()
    elif kind == "one_hot":
        z[rng.integers(n)] = z.max() + rng.uniform(5, 60)
    elif kind == "uniform":
        z[:] = z[0]
    return z


def split(p, num):
    """The num largest weights' indices and the others', ties by lowest index, as the reference selects."""
    order = np.argsort(-p, kind="stable")
    return order[:num], order[num:]
