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

from attnmon.capture.observe import CallInterceptor
from attnmon.capture.patching.replacement import LIVING, Replacement, Replacements
from attnmon.capture.patching.standins import active_link, chain, loaded, namespace_of
from attnmon.capture.routes.arguments import matched_boundaries, number
from attnmon.capture.routes.torch_calls import CallArgs
from attnmon.errors import UnsupportedAttention

_PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_3", "flash_attn_4")
_KEEPS_FUNCTIONS = "transformers.modeling_flash_attention_utils"  # fills globals of its own at the first call

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


class FlashPatch:
    """Stands before the functions of flash_attn; see ``attnmon.capture.observe.Patch``.

    Args:
        recorder: told of each call.
        modules: the watched modules.
    """

    def __init__(self, recorder: CallInterceptor, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        self._recorder, self._modules = recorder, modules
        self._replacements = Replacements(recorder)
        self._loaded: tuple[int, str] | None = None  # what was imported when the places were looked for
        self._names: dict[int, str] = {}  # of the functions, by identity
        self._places: list[_Place] = []
        self._placed: list[tuple[_Place, Replacement]] = []

    def install(self) -> None:
        if not any(package in sys.modules for package in _PACKAGES):
            return
        self._look()
        for place in self._places:
            function = place.get()
            if not callable(function) or _bottom_id(function) not in self._names:
                continue  # something else is there by now
            made = self._replacements.put_before(function, self._make, place.put)
            self._placed.append((place, made))

    def remove(self) -> None:
        self._replacements.deactivate_link()
        while self._placed:
            place, made = self._placed.pop()
            if place.get() is made:
                place.put(active_link(made))
        if self._names:
            self._clear_new_bindings()

    def _clear_new_bindings(self) -> None:
        """Modules that imported a function during the step have the replacement."""
        names = [_KEEPS_FUNCTIONS]
        if loaded() != self._loaded:
            names = list(sys.modules)
        for namespace in (namespace_of(name) for name in names):
            for name, value in list(namespace.items()):
                if type(value) is Replacement and value.recorder is self._recorder:
                    namespace[name] = active_link(value)

    # -- where they are -------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find the functions and who holds them, unless no module was imported since the last time."""
        if loaded() == self._loaded:
            return
        self._loaded = loaded()
        functions: dict[int, Any] = {}
        for module in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
            namespace = namespace_of(module)
            for name in _FUNCTIONS:
                function = chain(namespace.get(name))[-1]
                if callable(function):
                    functions[id(function)] = function
                    self._names[id(function)] = name
        wanted = set(functions) | {id(living) for living in list(LIVING) if _bottom_id(living) in functions}
        self._places = list(self._search(wanted))

    def _search(self, wanted: set[int]) -> Iterator[_Place]:
        for module in list(sys.modules):
            namespace = namespace_of(module)
            found = list(_holders(namespace, wanted))
            yield from (_Place(namespace, name) for name in found)
            if found and not module.startswith(_PACKAGES):
                for table in [value for value in list(namespace.values()) if type(value) is dict]:
                    yield from (_Place(table, name) for name in _holders(table, wanted))
        classes: dict[type, None] = {}
        for reference in self._modules:
            owner = reference()
            if owner is not None:
                classes.update(dict.fromkeys(type(owner).__mro__[: type(owner).__mro__.index(nn.Module)]))
                yield from (_Place(reference, name) for name in _holders(vars(owner), wanted))
        for kind in classes:
            yield from (_Place(kind, name) for name in _holders(vars(kind), wanted))

    def _make(self, current: Any, bottom: Any) -> Replacement:
        fixed: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
        function = bottom
        if type(bottom) is functools.partial:
            function, fixed = bottom.func, (bottom.args, bottom.keywords)
        route = self._names[id(chain(function)[-1])]
        describe = functools.partial(describe_flash, route, parameters(route, chain(function)[-1]), fixed)
        return Replacement(self._recorder, route, current, describe)


class _Place:
    """Where a function is held: a namespace or table, a class, or a module (which it does not keep alive)."""

    def __init__(self, owner: dict[Any, Any] | type | weakref.ref[nn.Module], name: Any) -> None:
        self._owner, self._name = owner, name
        value = self._namespace().get(name)
        while isinstance(value, _Static):
            value = value.before
        self._static = value if isinstance(value, staticmethod) else None  # as it was

    def get(self) -> Any:
        value = self._namespace().get(self._name)
        return value.__func__ if isinstance(value, staticmethod) else value

    def put(self, function: Any) -> None:
        if self._static is not None:
            function = self._static if function is self._static.__func__ else _Static(function, self._static)
        if isinstance(self._owner, type):
            setattr(self._owner, self._name, function)
        else:
            namespace = self._namespace()
            if self._name in namespace:
                namespace[self._name] = function

    def _namespace(self) -> Any:
        if isinstance(self._owner, dict):
            return self._owner
        owner = self._owner() if isinstance(self._owner, weakref.ref) else self._owner
        return {} if owner is None else vars(owner)


class _Static(staticmethod):  # type: ignore[type-arg]
    """A replacement in the place of a static method, which it keeps."""

    def __init__(self, function: Callable[..., Any], before: Any) -> None:
        super().__init__(function)
        self.before = before


def _holders(namespace: Mapping[Any, Any], wanted: set[int]) -> Iterator[Any]:
    """Names under which a wanted function is held, as it is, with some arguments given, or as a static method.

    Types are compared, since some objects do things when asked what they are an instance of.
    """
    for name, value in list(namespace.items()):
        if type(value) is functools.partial:
            value = value.func
        elif type(value) is staticmethod or type(value) is _Static:
            value = value.__func__
        if id(value) in wanted:
            yield name


def _bottom_id(function: Any) -> int:
    bottom = chain(function)[-1]
    return id(chain(bottom.func)[-1] if type(bottom) is functools.partial else bottom)


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
