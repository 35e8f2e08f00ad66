"""Attention as functions of torch: what each call describes.

An adapter turns the arguments of one function into the keyword arguments of ``attnmon.call.make_call``, or
raises UnsupportedAttention with the reason; it never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmon.call import CallArgs
from attnmon.errors import UnsupportedAttention


def describe_sdpa(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArgs:
    """``scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)``.

    Beside what a call is made of: ``originals``, the queries and keys themselves, and ``folded``, whether heads and
    sequences may share an axis.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    originals = (query, key)
    if not given.get("enable_gqa", False) and not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        whole = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (x.expand(*whole, *x.shape[-2:]) for x in (query, key, value))
    elif query.dim() == 4 and not query.shape[0] == key.shape[0] == value.shape[0]:
        batch = max(query.shape[0], key.shape[0], value.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    leading = query.dim() - 2
    return {
        "originals": originals,
        "folded": query.dim() == 3,
        "query": four_axes(query),
        "key": four_axes(key),
        "value": four_axes(value),
        "attn_mask": None if mask is None else _mask_axes(mask, leading, query.shape[: leading - 1]),
        "is_causal": bool(given.get("is_causal", False)),
        "scale": given.get("scale"),
    }


def four_axes(tensor: Tensor) -> Tensor:
    """[N, L, D] as one head of N sequences; [..., H, L, D] with the leading axes folded into one."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() < 4:
        return tensor[:, None] if tensor.dim() == 3 else tensor[None, None]
    return tensor.flatten(0, tensor.dim() - 4)


def _mask_axes(mask: Tensor, leading: int, batch_shape: torch.Size) -> Tensor:
    if leading == 2 or mask.dim() <= 2:
        return mask
    if leading < 2:
        return mask[:, None] if mask.dim() == 3 else mask
    tail = mask.shape[-3:] if mask.dim() >= 3 else (1, *mask.shape)
    return mask.expand(*batch_shape, *tail).flatten(0, leading - 2)


STATIC = "multi_head_attention_forward with static_k or static_v"
_MHA_ARGUMENTS = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)


def mha_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``F.multi_head_attention_forward`` by name."""
    return {**dict(zip(_MHA_ARGUMENTS, args, strict=False)), **kwargs}


def describe_mha(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sample_sequences: Callable[[int], slice],
    autocast: torch.dtype | None = None,
) -> CallArgs:
    """``F.multi_head_attention_forward``, what nn.MultiheadAttention and nn.Transformer layers call.

    Its projections are made again, for the sampled sequences only.

    Args:
        args, kwargs: of the call.
        sample_sequences: batch size -> which sequences.
        autocast: what autocast had the projections computed in.
    """
    given = mha_arguments(args, kwargs)
    if given.get("static_k") is not None or given.get("static_v") is not None:
        raise UnsupportedAttention(STATIC)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    is_cross = query is not key
    if query.dim() == 2:  # unbatched
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
    batch, heads = query.shape[1], int(given["num_heads"])
    chosen = sample_sequences(batch)
    query, key, value = (tensor.detach()[:, chosen] for tensor in (query, key, value))
    if given.get("use_separate_proj_weight"):
        weights = [given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given.get("in_proj_bias")
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    if autocast is not None:
        query, key, value = (_cast(tensor, autocast) for tensor in (query, key, value))
        weights = [_cast(weight, autocast) for weight in weights]
        biases = [None if bias is None else _cast(bias, autocast) for bias in biases]
    query, key, value = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    count = query.shape[1]
    if mask is not None:
        if mask.dim() == 3:  # [B * heads, Lq, Lk]
            mask = mask.view(batch, heads, *mask.shape[1:])[chosen]
        mask = ~mask if mask.dtype == torch.bool else mask  # True means hidden there, visible here
    if padding is not None:
        padding = (padding[None] if padding.dim() == 1 else padding)[chosen]
    rows = None if padding is None or query.shape[0] != key.shape[0] else padding
    # learned and zero keys are keys like others: they have values and every query sees them
    extra = []
    if given.get("bias_k") is not None:
        extra.append((given["bias_k"].expand(1, count, -1), given["bias_v"].expand(1, count, -1)))
    if given.get("add_zero_attn"):
        extra.append((torch.zeros_like(key[:1]), torch.zeros_like(value[:1])))
    for more_key, more_value in extra:
        key, value = torch.cat([key, more_key.to(key.dtype)]), torch.cat([value, more_value.to(value.dtype)])
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
        if padding is not None:
            padding = F.pad(padding, (0, 1), value=False if padding.dtype == torch.bool else 0.0)

    if extra and rows is not None and not is_cross:
        # padding queries are told by their keys; now that there are more keys than queries, the mask has to say it
        rows = (rows if rows.dtype == torch.bool else rows <= torch.finfo(rows.dtype).min / 2)[:, None, :, None]
        if mask is None or mask.dtype == torch.bool:
            mask = ~rows if mask is None else mask & ~rows
        else:
            mask = (mask if mask.dim() == 4 else mask[None, None]).masked_fill(rows, -torch.inf)

    def split(tensor: Tensor) -> Tensor:  # [L, S, E] -> [S, H, L, D]
        by_head: Tensor = tensor.unflatten(-1, (heads, -1))
        return by_head.permute(1, 2, 0, 3)

    return {
        "query": split(query),
        "key": split(key),
        "value": split(value),
        "attn_mask": mask,
        "key_padding_mask": padding,
        "is_causal": bool(given.get("is_causal", False)) and mask is None,
        "is_cross": is_cross,
    }


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does it: double precision stays."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_cast else tensor


@dataclass(frozen=True, slots=True)
class Route:
    """One attention function of torch.

    Attributes:
        name: how coverage calls it.
        describe: (args, kwargs, sample_sequences, autocast) -> what a call is made of.
            ``sample_sequences`` gives, for a batch size, the sequences to project; ``autocast`` is the dtype that
            products were cast to, or None.
    """

    name: str
    describe: Callable[[tuple[Any, ...], Mapping[str, Any], Callable[[int], slice], torch.dtype | None], CallArgs]


SDPA = Route("sdpa", lambda args, kwargs, sample_sequences, autocast: describe_sdpa(args, kwargs))
MHA = Route("multi_head_attention_forward", describe_mha)
ROUTES: dict[Any, Route] = {F.scaled_dot_product_attention: SDPA, F.multi_head_attention_forward: MHA}
"""Function -> its route."""
