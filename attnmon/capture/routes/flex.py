"""Flex attention: ``torch.nn.attention.flex_attention``, called eagerly or inside a compiled graph.

An eager call is seen by replacing the function; what it was given, score and mask functions included, is evaluated
later, on the sampled rows alone. In a graph those functions may close over tensors that exist only there, so their
rows are computed in the graph, beside the kernel: scores of a few fixed rows go to an operator. The same happens
where the function was compiled alone (``torch.compile(flex_attention)``), or is held where no replacement reaches.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from attnmon.call import CallArgs
from attnmon.capture.observe import CallInterceptor
from attnmon.capture.patching.function_patch import FunctionPatch
from attnmon.errors import UnsupportedAttention
from attnmon.flex_mods import MaskMod, mask_rows, score_rows

ROUTE = "flex_attention"
_MODULE = "torch.nn.attention.flex_attention"
_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale")


class FlexPatch(FunctionPatch):
    """Replaces ``flex_attention`` wherever a module holds it.

    Args:
        interceptor: told of each call.
    """

    def __init__(self, interceptor: CallInterceptor) -> None:
        super().__init__()
        self._interceptor = interceptor

    def functions(self) -> list[tuple[str, Any]]:
        return [(ROUTE, sys.modules[_MODULE].flex_attention)] if _MODULE in sys.modules else []

    def make(self, name: str, current: Callable[..., Any], bottom: Any) -> Callable[..., Any]:
        interceptor = self._interceptor

        @wraps(current)
        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the function mode sees the operator inside
                return current(*args, **kwargs)
            return interceptor.intercept(name, current, args, kwargs, describe_flex)

        return flex_attention


def operator() -> Any:
    """The higher-order operator that every call ends in; None where flex attention was never imported.

    The compiler imports it with the first graph that it traces; a graph is valid for the operator known before that.
    """
    if _MODULE not in sys.modules and "torch._dynamo" not in sys.modules:
        return None
    return importlib.import_module(_MODULE).flex_attention_hop


def describe_flex(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArgs:
    """``flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, ...)``, run unfused."""
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if key.shape[0] == 1:  # one sequence of keys for all queries
        key, value = (tensor.expand(query.shape[0], -1, -1, -1) for tensor in (key, value))
    return {
        "query": query,
        "key": key,
        "value": value,
        "score_mod": given.get("score_mod"),
        "mask_mod": mask_of(given.get("block_mask"), query.shape[2], key.shape[2], fused=False),
        "scale": given.get("scale"),
    }


def mask_of(block_mask: Any, num_queries: int, num_keys: int, *, fused: bool) -> MaskMod | None:
    """What a BlockMask masks, as a function; None if nothing.

    Args:
        fused: the fused kernels skip blocks that the block mask does not list; the unfused one asks the mask
            function alone. They differ only where a block mask was not made of its mask function.

    Raises:
        UnsupportedAttention: it was made for other lengths.
    """
    if block_mask is None:
        return None
    mask_mod: MaskMod = block_mask.mask_mod
    is_noop = mask_mod is getattr(sys.modules.get(_MODULE), "noop_mask", None)
    lengths = tuple(getattr(block_mask, "seq_lengths", (num_queries, num_keys)))
    if lengths != (num_queries, num_keys):
        if is_noop and lengths == (1, 1):  # what flex attention itself passes for "no mask"
            return None
        raise UnsupportedAttention(
            f"a block mask made for lengths {lengths[0]} x {lengths[1]} in a call of {num_queries} x {num_keys}"
        )
    if fused:
        return _listed_blocks(block_mask.as_tuple())
    return None if is_noop else mask_mod


def rows_in_graph(args: tuple[Any, ...], sequences: int, rows: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Scores of a few rows, from the arguments of the higher-order operator; for graphs that are being traced.

    Args:
        args: (query, key, value, score_mod, block mask as a tuple, scale, ...).
        sequences, rows: at most so many sequences, from the front, and evenly spaced rows R of each.

    Returns:
        scores [S, H, R, Lk], float32 or better, -inf at hidden keys; positions int64 [R]; values
        [S, Hkv, Lk, Dv]; scale.
    """
    query, key, value, score_mod, blocks, scale = args[:6]
    device = query.device
    num_s, length = min(query.shape[0], sequences), query.shape[2]
    num_r = min(length, rows)
    positions = (torch.arange(num_r, device=device) * length + length // 2) // num_r
    compute = torch.promote_types(query.dtype, torch.float32)
    q = query.detach()[:num_s].index_select(2, positions).to(compute)
    k, v = key.detach()[:num_s].to(compute), value.detach()[:num_s]
    if key.shape[0] == 1:
        k, v = k.expand(num_s, -1, -1, -1), v.expand(num_s, -1, -1, -1)
    group = query.shape[1] // key.shape[1]
    scores = (q.unflatten(1, (key.shape[1], group)) @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    index = (
        torch.arange(num_s, device=device),
        torch.arange(query.shape[1], device=device),
        positions.expand(num_s, num_r),
        torch.arange(key.shape[2], device=device),
    )
    visible = mask_rows(_listed_blocks(blocks), *index)
    scores = score_rows(score_mod, scores, *index)
    return torch.where(visible, scores, float("-inf")).detach(), positions, v, scale


def _listed_blocks(blocks: tuple[Any, ...]) -> MaskMod:
    """A block mask as the fused kernels read it: full blocks as they are, partial ones through its function.

    Args:
        blocks: ``BlockMask.as_tuple()``: lengths, then (number, indices) of partial and of full key blocks by query
            block, [B or 1, H or 1, blocks] and [..., blocks of keys]; at the end block sizes and mask function.
    """
    partial_count, partial_index, full_count, full_index = blocks[2:6]
    query_block, key_block, mask_mod = blocks[-3:]
    partial = _dense(partial_count, partial_index)
    full = None if full_count is None else _dense(full_count, full_index)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        where = (q // query_block, kv // key_block)
        shown: Tensor = mask_mod(b, h, q, kv) & _lookup(partial, b, h, *where)
        return shown if full is None else shown | _lookup(full, b, h, *where)

    return visible


def _dense(count: Tensor, index: Tensor) -> Tensor:
    """bool [B, H, query blocks, key blocks] from how many key blocks are listed and which come first."""
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    # what lies behind the list goes to a column of its own
    column = torch.where(listed, index.long(), index.shape[-1])
    table = torch.zeros(*index.shape[:-1], index.shape[-1] + 1, dtype=torch.bool, device=index.device)
    return table.scatter(-1, column, True)[..., :-1]


def _lookup(table: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """``table[b, h, q, kv]``, where an axis of size 1 holds for every index."""
    index = [q, kv]
    if table.shape[1] > 1:
        index.insert(0, h)
    else:
        table = table.squeeze(1)
    if table.shape[0] > 1:
        index.insert(0, b)
    else:
        table = table.squeeze(0)
    return table[tuple(index)]
