"""Attention calls as torch functions: a mode that looks at what modules call and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnmon.stats.api import make_call
from attnmon.types import AttentionCall


class CallMode(TorchFunctionMode):
    """Passes every torch call on unchanged, then reports it.

    Args:
        report: called with function, arguments and result, after the call.
    """

    def __init__(self, report: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._report(func, args, kwargs, result)
        return result


def is_sdpa(func: Any) -> bool:
    """Whether ``func`` is ``scaled_dot_product_attention``, however it was imported."""
    return func is F.scaled_dot_product_attention


def sdpa_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionCall:
    """The call that ``scaled_dot_product_attention(*args, **kwargs)`` describes.

    Raises:
        AttnmonError: arguments of a shape that is not measured.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    mask = given.get("attn_mask")
    leading = query.dim() - 2
    return make_call(
        four_axes(query),
        four_axes(key),
        four_axes(value),
        attn_mask=None if mask is None else _mask_axes(mask, leading, query.shape[: leading - 1]),
        is_causal=bool(given.get("is_causal", False)),
        scale=given.get("scale"),
    )


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
