"""Applies the score and mask functions of flex attention to sampled rows, as the kernel applies them to all rows.

``score_mod(score, b, h, q, kv) -> score`` and ``mask_mod(b, h, q, kv) -> bool`` are written for one score and four
indices, so they are mapped over each axis with ``torch.vmap``, as flex attention does. With broadcast index tensors
instead, a function that sums over a table's row would silently sum over queries, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnmon.errors import UnsupportedAttention

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# vmap axes of (b, h, q, kv), innermost first; q has two axes, [S, R], because rows differ by sequence
_AXES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, None))


def mask_rows(mask_mod: MaskMod, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys the rows see, bool [S, H, R, K].

    Args:
        mask_mod: (b, h, q, kv) -> bool, True = visible.
        batch: int64 [S] indices of sequences.
        heads: int64 [H] query heads; a single one is enough where the mask does not differ by head.
        queries: int64 [S, R] query positions.
        keys: int64 [K] key positions.
    """
    mapped: Callable[..., Tensor] = mask_mod
    for axes in _AXES:
        mapped = torch.vmap(mapped, in_dims=axes)
    with _index_lookups():
        return mapped(batch, heads, queries, keys)


def score_rows(
    score_mod: ScoreMod, scores: Tensor, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """Return the scores [S, H, R, K] as ``score_mod`` changes them.

    Args:
        score_mod: (score, b, h, q, kv) -> score.
        scores: float [S, H, R, K], scale * q.k.
        batch: int64 [S] indices of sequences.
        heads: int64 [H] query heads.
        queries: int64 [S, R] query positions.
        keys: int64 [K] key positions.
    """
    mapped: Callable[..., Tensor] = score_mod
    for axes in _AXES:
        mapped = torch.vmap(mapped, in_dims=(0, *axes))
    with _index_lookups():
        return mapped(scores, batch, heads, queries, keys)


def differs_by_head(mask_mod: MaskMod, device: torch.device) -> bool:
    """Return whether a mask function reads its head index.

    Raises:
        UnsupportedAttention: ``torch.vmap`` cannot map the function, so its mask is unknown.
    """
    heads = torch.zeros(2, dtype=torch.int64, device=device)
    zero = heads[0]
    try:
        with _index_lookups():
            torch.vmap(mask_mod, in_dims=(None, 0, None, None))(zero, heads, zero, zero)
            try:
                torch.vmap(mask_mod, in_dims=(None, 0, None, None), out_dims=None)(zero, heads, zero, zero)
            except ValueError:  # a result that is mapped over heads cannot be given as one without the axis
                return True
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise UnsupportedAttention(f"a mask_mod that torch.vmap cannot map: {type(error).__name__}: {first}") from error
    return False


def _index_lookups() -> TorchFunctionMode:
    """Return a mode in which ``table[index]`` with a mapped index is a lookup, not a conversion to a Python number."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
