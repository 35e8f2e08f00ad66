"""From the arguments of an attention call to one checked form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnmon.errors import AttnmonError, UnsupportedAttention
from attnmon.flex_mods import MaskMod, ScoreMod, differs_by_head
from attnmon.types import AttentionCall

CallArgs = dict[str, Any]
"""Arguments of ``make_call`` by name, as routes describe a call. Two more are taken out before that: ``originals``, the
queries and keys as the module has them, and ``folded``, whether heads are in the first axis."""


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    hidden: Tensor | None = None,
    is_cross: bool = False,
    prescale: float = 1.0,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> AttentionCall:
    """Validate the arguments of a call and bring them to one form.

    Raises:
        AttnmonError: shapes, dtypes or combinations that mean nothing.
        UnsupportedAttention: meaningful, but not measured.
    """
    _check_floats(query=query, key=key, value=value)
    batch, heads, length, dim = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    if key.shape[0] != batch or key.shape[3] != dim:
        raise AttnmonError(f"key must be [{batch}, Hkv, Lk, {dim}] to match query; got {list(key.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise AttnmonError(f"query heads must be a multiple of key heads; got {heads} and {kv_heads}")
    if value is not None and tuple(value.shape[:3]) != tuple(key.shape[:3]):
        raise AttnmonError(f"value must be {list(key.shape[:3])} + [Dv] to match key; got {list(value.shape)}")
    if num_keys == 0 or length == 0 or batch == 0:
        raise AttnmonError(f"query and key must not be empty; got {list(query.shape)} and {list(key.shape)}")
    if scale is None:
        scale = dim**-0.5
    if not 0 < scale < math.inf:
        raise AttnmonError(f"scale must be a positive number; got {scale!r}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise AttnmonError(f"softcap must be a positive number or None; got {softcap!r}")
    if sinks is not None:
        if sinks.numel() != heads:
            raise AttnmonError(f"sinks must hold one logit per query head, [{heads}]; got {list(sinks.shape)}")
        sinks = sinks.detach().reshape(heads)
    if attn_mask is not None:
        attn_mask = _mask_4d(attn_mask, (batch, heads, length, num_keys))
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, num_keys):
        raise AttnmonError(f"key_padding_mask must be [{batch}, {num_keys}]; got {list(key_padding_mask.shape)}")
    if key_padding_mask is not None and not _is_mask(key_padding_mask):
        raise AttnmonError(
            f"key_padding_mask must be bool (True = padding) or float (added); got {key_padding_mask.dtype}"
        )
    if hidden is not None and (hidden.dim() != 3 or tuple(hidden.shape[:2]) != (batch, num_keys)):
        raise AttnmonError(f"hidden must be [{batch}, {num_keys}, E]; got {list(hidden.shape)}")
    if cu_seqlens is not None:
        if batch != 1 or length != num_keys:
            raise AttnmonError(
                f"cu_seqlens describes sequences packed into one (B = 1, Lq == Lk); got B = {batch}, "
                f"Lq = {length}, Lk = {num_keys}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype.is_floating_point:
            raise AttnmonError(f"cu_seqlens must be int [documents + 1]; got {list(cu_seqlens.shape)}")
        if key_padding_mask is not None:
            raise UnsupportedAttention("cu_seqlens and key_padding_mask together; packed sequences have no padding")
    return AttentionCall(
        query=query.detach(),
        key=key.detach(),
        value=None if value is None else value.detach(),
        scale=float(scale),
        head_dim=dim,
        attn_mask=attn_mask,
        is_causal=bool(is_causal),
        causal_offset=causal_offset,
        softcap=softcap,
        sinks=sinks,
        window=normalize_window(window),
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        hidden=None if hidden is None else hidden.detach(),
        is_cross=is_cross,
        prescale=prescale,
        score_mod=score_mod,
        mask_mod=mask_mod,
        mask_mod_by_head=mask_mod is not None and differs_by_head(mask_mod, query.device),
    )


def normalize_window(
    window: int | tuple[int | None, int | None] | None,
) -> tuple[int | None, int | None] | None:
    """(left, right) as lookback and lookahead, None for no limit; None for no window at all."""
    if window is None:
        return None
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise AttnmonError(f"window must be at least 1 (the query's own key); got {window}")
        return (window - 1, window - 1)
    try:
        left, right = window  # type: ignore[misc]
    except (TypeError, ValueError):
        raise AttnmonError(f"window must be an int or a pair (left, right); got {window!r}") from None
    sides = tuple(None if side is None or side < 0 else int(side) for side in (left, right))
    return None if sides == (None, None) else (sides[0], sides[1])


def _check_floats(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None and name == "value":
            continue
        if not isinstance(tensor, Tensor):
            raise AttnmonError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise AttnmonError(f"{name} must have 4 axes [B, heads, L, D]; got {list(tensor.shape)}")
        if not tensor.dtype.is_floating_point:
            raise AttnmonError(f"{name} must be of a float dtype; got {tensor.dtype}")


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or mask.dtype.is_floating_point


def _mask_4d(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    if not _is_mask(mask):
        raise AttnmonError(f"attn_mask must be bool (True = visible) or float (added); got {mask.dtype}")
    if mask.dim() > 4:
        raise AttnmonError(f"attn_mask must broadcast to {list(shape)}; got {list(mask.shape)}")
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    if any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
        raise AttnmonError(f"attn_mask must broadcast to {list(shape)}; got {list(mask.shape)}")
    # an expanded axis says the same of every index; the cheaper paths look at sizes
    for axis, stride in enumerate(mask.stride()[:3]):
        if stride == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask if mask.shape[3] == shape[3] else mask.expand(-1, -1, -1, shape[3])
