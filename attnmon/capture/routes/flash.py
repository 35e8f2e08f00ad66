"""The functions of the flash_attn package, called by a model directly.

No torch-level mode sees these kernels. For the length of a measured step the functions are replaced in every
namespace that holds them (``from flash_attn import flash_attn_func`` makes as many as there are importing modules),
among the attributes of the watched modules and of their classes, and in tables of functions beside them. The package
is never imported: where nobody else did, there is nothing to replace. Tensors are [B, L, H, D], packed [total, H, D].
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnmon.call import CallArgs
from attnmon.capture.observe import CallInterceptor
from attnmon.capture.patching.function_patch import Binding, FunctionPatch, names_of
from attnmon.capture.patching.links import chain, loaded, namespace_of
from attnmon.capture.patching.replacement import Replacement
from attnmon.capture.routes.arguments import matched_boundaries, number
from attnmon.errors import UnsupportedAttention

_PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_4")

_OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")
_FUNCTIONS = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_varlen_func": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen"),
}
_UNDERSTOOD = frozenset(
    {"q", "k", "v", "kv", "qkv", "num_heads_q", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}
    | {"softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "s_aux", "learnable_sink"}
)
_HARMLESS = frozenset(
    {"dropout_p", "deterministic", "return_attn_probs", "return_softmax_lse", "return_softmax", "return_lse"}
    | {"max_seqlen", "max_seqlen_q", "max_seqlen_k", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"}
)
_DENSE_ELEMENTS = 1 << 22  # of a bias that is written out; larger ones are refused


class FlashPatch(FunctionPatch):
    """Stands before the functions of flash_attn.

    Args:
        interceptor: told of each call.
        modules: the watched modules.
    """

    late_binders = ("transformers.modeling_flash_attention_utils",)  # fills globals of its own at the first call

    def __init__(self, interceptor: CallInterceptor, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        super().__init__()
        self._interceptor, self._modules = interceptor, modules
        self._seen: tuple[int, str] | None = None  # what was imported when the packages were looked through
        self._found: list[tuple[str, Any]] = []

    def functions(self) -> list[tuple[str, Any]]:
        if loaded() != self._seen:
            self._seen = loaded()
            spaces = [namespace_of(name) for name in sys.modules if name.partition(".")[0] in _PACKAGES]
            held = [(name, space.get(name)) for space in spaces for name in _FUNCTIONS]
            self._found = [(name, chain(function)[-1]) for name, function in held if callable(function)]
        return self._found

    def further(self, wanted: set[int], holders: Mapping[str, dict[str, Any]]) -> Iterator[Binding]:
        """Tables beside the functions, attributes of the watched modules and of their classes."""
        for module, namespace in holders.items():
            if not module.startswith(_PACKAGES):
                for table in [value for value in list(namespace.values()) if type(value) is dict]:
                    yield from (Binding(table, name) for name in names_of(wanted, table))
        classes: dict[type, None] = {}
        for reference in self._modules:
            owner = reference()
            if owner is not None:
                classes.update(dict.fromkeys(type(owner).__mro__[: type(owner).__mro__.index(nn.Module)]))
                yield from (Binding(reference, name) for name in names_of(wanted, vars(owner)))
        for kind in classes:
            yield from (Binding(kind, name) for name in names_of(wanted, vars(kind)))

    def make(self, name: str, current: Any, bottom: Any) -> Replacement:
        fixed: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        function = bottom
        if type(bottom) is functools.partial:
            function, fixed = bottom.func, (bottom.args, bottom.keywords)
        describe = functools.partial(describe_flash, name, parameters(name, chain(function)[-1]), fixed)
        return Replacement(self._interceptor, name, current, describe)


def parameters(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters; they differ between versions of the package."""
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return (*_FUNCTIONS[name], *_OPTIONS)
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in known):
        return (*_FUNCTIONS[name], *_OPTIONS)
    return tuple(parameter.name for parameter in known)


# -- what a call means --------------------------------------------------------------------------------------


def describe_flash(
    name: str,
    positional: tuple[str, ...],
    fixed: tuple[tuple[Any, ...], Mapping[str, Any]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CallArgs:
    """A call of one of the package's functions.

    Args:
        name: which.
        positional: the names of its parameters.
        fixed: arguments that were given before (``functools.partial``).
        args, kwargs: arguments of the call.
    """
    all_args = (*fixed[0], *args)
    if len(all_args) > len(positional):
        raise UnsupportedAttention(f"{name} with {len(all_args)} positional arguments")
    given = {**dict(zip(positional, all_args, strict=False)), **fixed[1], **kwargs}
    for argument, value in given.items():
        if argument in _UNDERSTOOD or argument in _HARMLESS or value is None or value is False:
            continue
        if isinstance(value, (int, float)) and value == 0:
            continue
        raise UnsupportedAttention(f"the argument {argument} of {name}")
    query, key, value = _tensors(name, given)
    cu_seqlens, mask = _boundaries(given)
    offset = 0 if cu_seqlens is not None else key.shape[2] - query.shape[2]
    softcap = number("softcap", given.get("softcap"))
    slopes, described = given.get("alibi_slopes"), {}
    if slopes is not None:
        described = _alibi(slopes, query.shape, key.shape[2], offset, mask, packed=cu_seqlens is not None)
        if softcap and "score_mod" in described:
            raise UnsupportedAttention("alibi_slopes and softcap with sequences this long")
    sinks = given.get("s_aux") if given.get("learnable_sink") is None else given["learnable_sink"]
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "is_causal": bool(given.get("causal", False)),
        "causal_offset": offset,
        "scale": number("softmax_scale", given.get("softmax_scale")),
        "softcap": softcap if softcap else None,
        "sinks": None if sinks is None else sinks.reshape(-1),
        "window": tuple(given.get("window_size") or (None, None)),
        "cu_seqlens": cu_seqlens,
        **described,
    }


def _tensors(name: str, given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [B, H, L, D]."""
    if "qkv" in given:
        qkv, heads = given["qkv"], given.get("num_heads_q")
        if heads is not None and qkv.dim() == (3 if "varlen" in name else 4):
            groups = (qkv.shape[-2] - heads) // 2
            query, key, value = qkv.split([heads, groups, groups], dim=-2)
        else:
            query, key, value = qkv.unbind(-3)
    elif "kv" in given:
        query = given["q"]
        key, value = given["kv"].unbind(-3)
    else:
        query, key, value = given["q"], given["k"], given["v"]
    tensors = [tensor[None] if "varlen" in name else tensor for tensor in (query, key, value)]
    if any(tensor.is_nested or tensor.dim() != 4 for tensor in tensors):
        raise UnsupportedAttention(f"{name} with tensors of shapes other than the package documents")
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    return query, key, value


def _boundaries(given: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    if "cu_seqlens" in given:
        return given["cu_seqlens"], None
    if given.get("cu_seqlens_q") is None:
        return None, None
    return matched_boundaries(given["cu_seqlens_q"], given.get("cu_seqlens_k"))


def _alibi(
    slopes: Tensor, query: Sequence[int], keys: int, offset: int, mask: Tensor | None, *, packed: bool
) -> CallArgs:
    """The bias -slope * |i + offset - j|: written out, or as a function where that would be large."""
    slopes = slopes.detach().float()
    if slopes.dim() == 1:
        slopes = slopes[None]
    elif packed:
        raise UnsupportedAttention("alibi_slopes that differ between packed sequences")
    if slopes.shape[0] * slopes.shape[1] * query[2] * keys > _DENSE_ELEMENTS:
        if torch.compiler.is_compiling():
            raise UnsupportedAttention("alibi_slopes with sequences this long in a compiled graph")
        slopes = slopes.expand(query[0], -1)
        return {"score_mod": lambda score, b, h, i, j: score - slopes[b, h] * (i + offset - j).abs()}
    rows = torch.arange(query[2], device=slopes.device) + offset
    distance = (rows[:, None] - torch.arange(keys, device=slopes.device)).abs()
    bias = -slopes[:, :, None, None] * distance
    return {"attn_mask": bias if mask is None else torch.where(mask, bias, float("-inf"))}
