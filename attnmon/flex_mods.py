"""Score and mask functions of flex attention, applied to some rows as the kernel applies them to all.

``score_mod(score, b, h, q, kv) -> score`` and ``mask_mod(b, h, q, kv) -> bool`` are written for one score and four
indices, so they are mapped over each axis (``torch.vmap``, what flex attention itself does); with broadcast index
tensors instead, a function that sums over a table's row would silently sum over queries, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnmon.errors import UnsupportedAttention

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# of (b, h, q, kv), innermost first; q differs by sequence: [S, R]
_AXES = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, None))


def mask_rows(mask_mod: MaskMod, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Which keys the rows see: bool [S, H, R, K].

    Args:
        batch: int64 [S] indices of sequences.
        heads: [H] query heads; one of them stands for all where the mask does not differ by head.
        queries: [S, R] query positions.
        keys: [K] key positions.
    """
    mapped: Callable[..., Tensor] = mask_mod
    for axes in _AXES:
        mapped = torch.vmap(mapped, in_dims=axes)
    with _lookups():
        return mapped(batch, heads, queries, keys)


def score_rows(
    score_mod: ScoreMod, scores: Tensor, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """``scores`` [S, H, R, K] (scale * q.k) as ``score_mod`` changes them; indices as of ``mask_rows``."""
    mapped: Callable[..., Tensor] = score_mod
    for axes in _AXES:
        mapped = torch.vmap(mapped, in_dims=(0, *axes))
    with _lookups():
        return mapped(scores, batch, heads, queries, keys)


def differs_by_head(mask_mod: MaskMod, device: torch.device) -> bool:
    """Whether a mask function reads its head index.

    Raises:
        UnsupportedAttention: it cannot be mapped over an axis, so there is no telling what it masks.
    """
    heads = torch.zeros(2, dtype=torch.int64, device=device)
    zero = heads[0]
    try:
        with _lookups():
            torch.vmap(mask_mod, in_dims=(None, 0, None, None))(zero, heads, zero, zero)
            try:
                torch.vmap(mask_mod, in_dims=(None, 0, None, None), out_dims=None)(zero, heads, zero, zero)
            except ValueError:  # a result that is mapped over heads cannot be given as one without the axis
                return True
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise UnsupportedAttention(f"a mask_mod that torch.vmap cannot map: {type(error).__name__}: {first}") from error
    return False


def _lookups() -> TorchFunctionMode:
    """Inside, ``table[index]`` with a mapped index is a lookup and not a request for a Python number."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
