"""Which keys a row sees: one place composes causal triangles, windows, padding, documents and masks."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmon.flex_mods import mask_rows
from attnmon.types import AttentionCall

MASKED_BIAS = -1e8
"""A float mask at or below this hides the key even above ``finfo.min / 2``: no positional bias takes such a
value, and models do mask with -1e9."""


def mask_threshold(dtype: torch.dtype) -> float:
    """The value at or below which an entry of a float mask hides its key; above it, the entry is a bias.

    Args:
        dtype: of the mask.
    """
    return max(torch.finfo(dtype).min / 2, MASKED_BIAS)


def key_valid(call: AttentionCall, sequences: slice) -> Tensor | None:
    """Keys that padding leaves visible: ``key_padding_mask``, and an ``attn_mask`` that has one row for all queries.

    Args:
        call: the call.
        sequences: which sequences of the call; S of them.

    Returns:
        bool [S, Lk], of head 0 where a mask differs by head; None if all keys are visible.
    """
    valid: Tensor | None = None
    padding = call.key_padding_mask
    if padding is not None:
        padding = padding[sequences]
        valid = ~padding if padding.dtype == torch.bool else ~(padding <= mask_threshold(padding.dtype))
    mask = call.attn_mask
    if mask is not None and mask.shape[2] == 1:
        mask = mask[sequences if mask.shape[0] > 1 else slice(None), 0, 0]
        visible = mask if mask.dtype == torch.bool else ~(mask <= mask_threshold(mask.dtype))
        valid = visible if valid is None else valid & visible
    return valid


def visible_keys(
    call: AttentionCall, sequences: slice, positions: Tensor, heads: slice, keys: slice
) -> tuple[Tensor | None, Tensor | None]:
    """Visibility and bias of sampled rows.

    Args:
        call: the call.
        sequences: which sequences of the call; S of them.
        positions: [S, R] int64 query positions.
        heads: which query heads (only masks that differ by head care).
        keys: which keys; K of them, a range of 0 ... Lk.

    Returns:
        visible: bool, broadcastable to [S, heads, R, K]; None if every key is visible.
        bias: float32, likewise; None if there is none. Finite wherever visible is True, unless the model's
            own bias is not.
    """
    visible: Tensor | None = None
    bias: Tensor | None = None

    def hide(other: Tensor) -> None:
        nonlocal visible
        visible = other if visible is None else visible & other

    def add(other: Tensor) -> None:
        nonlocal bias
        bias = other if bias is None else bias + other

    if call.is_causal or call.window is not None:
        ahead = (
            torch.arange(keys.start, keys.stop, device=positions.device)
            - (positions + call.causal_offset)[:, None, :, None]
        )  # [S, 1, R, K]
        if call.is_causal:
            hide(ahead <= 0)
        if call.window is not None:
            left, right = call.window
            if left is not None:
                hide(ahead >= -left)
            if right is not None:
                hide(ahead <= right)
    if call.cu_seqlens is not None:
        index = torch.arange(keys.start, keys.stop, device=positions.device)
        document = documents(call.cu_seqlens, positions)
        hide(documents(call.cu_seqlens, index) == document[:, None, :, None])
        hide(((index >= call.cu_seqlens[0]) & (index < call.cu_seqlens[-1]))[None, None, None])  # the rest is padding
    padding = call.key_padding_mask
    if padding is not None:
        padding = padding[sequences][:, None, None, keys]
        if padding.dtype == torch.bool:
            hide(~padding)
        else:
            hide(~(padding <= mask_threshold(padding.dtype)))
            add(_wide(padding))
    mask = call.attn_mask
    if mask is not None:
        if mask.shape[0] > 1:
            mask = mask[sequences]
        if mask.shape[1] > 1:
            mask = mask[:, heads]
        mask = mask[..., keys]
        if mask.shape[2] > 1:
            index = positions[:, None, :, None]
            if mask.shape[0] == 1 and positions.shape[0] > 1:
                mask = mask.expand(positions.shape[0], -1, -1, -1)
            mask = mask.gather(2, index.expand(-1, mask.shape[1], -1, mask.shape[3]))
        if mask.dtype == torch.bool:
            hide(mask)
        else:
            hide(~(mask <= mask_threshold(mask.dtype)))  # NaN stays visible: a fault to be counted
            add(_wide(mask))
    if call.mask_mod is not None:
        hide(mask_rows(call.mask_mod, *mod_indices(call, sequences, positions, heads, keys)))
    if visible is not None and bias is not None:
        bias = torch.where(visible, bias, 0.0)
    return visible, bias


def mod_indices(
    call: AttentionCall, sequences: slice, positions: Tensor, heads: slice, keys: slice, *, every_head: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices that score and mask functions are called with.

    Args:
        call, sequences, positions, heads, keys: as in ``visible_keys``.
        every_head: give every head's index even if the mask function does not read it.

    Returns:
        b [S], h [heads] (one head where the mask function reads none and not ``every_head``), q [S, R] and kv [K].
    """
    device = positions.device
    batch = torch.arange(call.num_sequences, device=device)[sequences]
    first = heads.start or 0
    last = heads.stop if every_head or call.mask_mod_by_head else first + 1
    head = torch.arange(first, last, device=device)
    return batch, head, positions, torch.arange(keys.start, keys.stop, device=device)


def documents(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """Index of the packed document that each position lies in.

    Args:
        cu_seqlens: int [documents + 1], boundaries of the documents.
        positions: int64 [...].

    Returns:
        int64 [...]; the number of documents for positions beyond the last one.
    """
    return torch.searchsorted(cu_seqlens[1:].contiguous().long(), positions.contiguous(), right=True)


def _wide(bias: Tensor) -> Tensor:
    return bias.to(torch.promote_types(bias.dtype, torch.float32))
