"""Host side of the fused path, free of triton: which calls it takes, how tiles are cut, and the table of rows.

The kernels see which keys a row can see as a range (causal triangles, windows and packed documents are all
ranges), a mask of padding, and an attention mask. The ranges and everything else that depends on sampled positions
alone is one small integer tensor, made once per plan and shared by all layers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from attnmon.stats.directions import TABLE_SIZE, direction_start
from attnmon.stats.plan import Plan
from attnmon.stats.settings import Settings
from attnmon.stats.visibility import documents
from attnmon.types import AttentionCall

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
MAX_TOP_N = 64
MAX_KEYS = 2**31 - 2**10  # indices of keys are int32, and the kernels count a few beyond the last

LEAST_KEPT = 8
"""Largest weights of a row that are kept one by one, at least; the eigenvalue settles with five."""

LARGE_STEP = 5.0
"""Of eps / tau: beyond, a step may move single logits out of exp's range, and sums for that case are kept."""

SCRATCH_BYTES = 1 << 26
"""Bound of the partial results of one launch; more rows take several. Lk does not enter."""

_PROGRAMS_PER_PROCESSOR = 4
_KEYS_WORTH_A_SPLIT = 512
_MAX_SPLITS = 32


def unavailable(device: torch.device | None) -> str | None:
    """Why kernels cannot run here, or None. Never imports triton.

    Args:
        device: where the tensors are; None: not known yet.
    """
    if not _has_triton():
        return "the package 'triton' is not installed; pip install 'attnmon[triton]' brings it"
    if device is not None and device.type != "cuda" and not interpreted():
        return (
            f"it runs on CUDA and ROCm devices and the tensors are on {device.type!r} (TRITON_INTERPRET=1 is not set)"
        )
    if device is None and not interpreted() and not torch.cuda.is_available():
        return "there is no CUDA or ROCm device (and TRITON_INTERPRET=1 is not set)"
    return None


@cache
def _has_triton() -> bool:
    try:
        return find_spec("triton") is not None
    except ModuleNotFoundError:
        return False


def interpreted() -> bool:
    """Whether kernels run in triton's interpreter, on the CPU; read when triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def unsupported(call: AttentionCall, settings: Settings) -> str | None:
    """Why the fused path cannot take this call, or None.

    Reasons are about kinds and sizes, never about values, since reading a value would wait for the device.

    Args:
        call: the call.
        settings: what to measure.
    """
    if call.logits is not None or call.query is None or call.key is None:
        return "logits without queries and keys (eager attention)"
    if call.weights is not None:
        return "a normalizer other than softmax"
    if call.score_mod is not None or call.mask_mod is not None:
        return "a score_mod or mask_mod function"
    tokens = tokens_of(call, settings)
    for name, tensor in (("query", call.query), ("key", call.key), ("tokens", tokens)):
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"{name} of {tensor.dtype}; float32, bfloat16 and float16 are taken"
    for name, mask in (("attn_mask", call.attn_mask), ("key_padding_mask", call.key_padding_mask)):
        if mask is not None and mask.dtype not in (torch.bool, *DTYPES):
            return f"{name} of {mask.dtype}; bool, float32, bfloat16 and float16 are taken"
    if call.head_dim > MAX_HEAD_DIM:
        return f"head_dim {call.head_dim} above {MAX_HEAD_DIM}"
    if settings.top_n > MAX_TOP_N:
        return f"top_n {settings.top_n} above {MAX_TOP_N}"
    if call.key.shape[2] > MAX_KEYS:
        return f"more than {MAX_KEYS} keys"
    return None


def tokens_of(call: AttentionCall, settings: Settings) -> Tensor | None:
    """Token vectors [B, Hkv or 1, Lk, E] of a call, or None if it has none or no metric of the settings reads them."""
    if not settings.needs_tokens:
        return None
    if settings.tokens == "hidden":
        return None if call.hidden is None else call.hidden[:, None]
    return call.value


def row_table(call: AttentionCall, plan: Plan) -> Tensor:
    """What the kernels are told of each sampled row; made once per plan.

    Args:
        call: a call with queries and keys.
        plan: its sampled rows.

    Returns:
        int32 [5, S, R]: position, first visible key, one past the last visible key, the sequence's first key, and the
        direction's place: its entry at key j is ``table[(place + j) % TABLE_SIZE]``. The order is that of the
        constants ``T_...`` in ``fields.py``.
    """
    assert call.key is not None
    kind = ("fused rows", call.is_causal, call.causal_offset, call.window, call.key.shape[2])
    if call.cu_seqlens is None and kind in plan.shared:
        return plan.shared[kind]  # type: ignore[no-any-return]
    positions, num_keys = plan.positions, call.key.shape[2]
    aligned = positions + call.causal_offset
    left, right = call.window or (None, None)
    if call.is_causal:
        right = 0 if right is None else min(right, 0)
    low = torch.zeros_like(positions) if left is None else aligned - left
    high = torch.full_like(positions, num_keys) if right is None else aligned + (right + 1)
    if call.cu_seqlens is not None:
        starts = call.cu_seqlens.long()
        document = documents(call.cu_seqlens, positions)
        low = low.maximum(starts[document])
        high = high.minimum(starts[(document + 1).clamp(max=starts.shape[0] - 1)])
    low, high = low.clamp(0, num_keys), high.clamp(0, num_keys)
    first = torch.zeros_like(positions) if plan.first_key is None else plan.first_key
    place = (direction_start(positions - first) - first) % TABLE_SIZE
    table = torch.stack([positions, low, high, first, place]).to(torch.int32)
    plan.shared[kind] = table
    return table


@dataclass(frozen=True)
class Tiles:
    """How a call is cut.

    Attributes:
        BM: rows of a tile, in the passes over keys.
        BN: keys of a block, in the passes over keys.
        BD, BE: chunks of the head dimension and of token vectors, in the passes over keys.
        warps, stages: of the passes over keys.
        BR: rows of a program of ``merge``.
        BF: rows of an iteration of ``finish``.
        BG: chunk of token vectors in ``merge`` and ``finish``.
        row_warps: of ``merge`` and ``finish``.
    """

    BM: int
    BN: int
    BD: int
    BE: int
    warps: int
    stages: int
    BR: int
    BF: int
    BG: int
    row_warps: int


def on_rocm() -> bool:
    """Whether this torch is for AMD devices."""
    return torch.version.hip is not None


def power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def tile_rows(num_rows: int) -> int:
    """Rows of a tile, for ``num_rows`` rows of one sequence and key head."""
    return 16 if num_rows <= 32 or on_rocm() else 32


def tiles(num_rows: int, head_dim: int, width: int, wide: bool, busy: bool, slots: int, splits: int) -> Tiles:
    """Tiles of a call.

    Args:
        num_rows: rows of one sequence and key head.
        head_dim: D.
        width: E of the token vectors (1 without).
        wide: products run in float32 rather than in 16 bits.
        busy: biases and large steps together, which take more registers.
        slots: of a row's list of largest logits.
        splits: parts that the keys are cut into.
    """
    chunk = 32 if wide else 64
    rows = tile_rows(num_rows)
    ragged = power_of_two(head_dim) != head_dim or power_of_two(width) != width
    merged = max(1, min(4, 1024 // (slots * splits)))
    return Tiles(
        BM=rows,
        BN=16 if wide and (head_dim > 128 or busy) else 32 if wide or ragged else 64,
        BD=min(max(16, power_of_two(head_dim)), chunk),
        BE=min(max(16, power_of_two(width)), chunk),
        warps=4 if rows == 16 else 8,
        stages=2,
        BR=merged,
        BF=16,
        BG=min(power_of_two(width), max(16, 4096 // (merged * slots))),
        row_warps=4,
    )


def choose_splits(programs: int, num_keys: int, processors: int) -> int:
    """Parts (a power of two) that each tile's keys are cut into, so that all processors have work.

    Args:
        programs: tiles of the call.
        num_keys: Lk.
        processors: multiprocessors of the device.
    """
    wanted = power_of_two(-(-_PROGRAMS_PER_PROCESSOR * processors // max(1, programs)))
    worth = 1 << max(0, (num_keys // _KEYS_WORTH_A_SPLIT).bit_length() - 1)
    return max(1, min(wanted, worth, _MAX_SPLITS))
