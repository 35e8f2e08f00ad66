"""The attention registry of transformers: flash kernels and others that torch-level modes do not see.

Every implementation but eager attention passes through it, as (module, query, key, value, attention_mask, ...)
with tensors [B, H, L, D]. Entries are replaced for the length of a measured step. transformers itself is never
imported: where nobody else did, there is no registry.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnmon.call import CallArgs
from attnmon.capture.observe import CallInterceptor
from attnmon.capture.patching.function_patch import Binding, Links
from attnmon.capture.patching.replacement import Replacement
from attnmon.capture.routes.arguments import matched_boundaries, number
from attnmon.capture.routes.flex import mask_of
from attnmon.errors import UnsupportedAttention

if TYPE_CHECKING:
    from attnmon.capture.coverage import Site

_Table = dict[str, Any]

_HARMLESS = frozenset(
    {"dropout", "training", "deterministic", "target_dtype", "layer_idx", "kernel_options", "num_items_in_batch"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "seq_idx"}
    | {"cache", "past_key_value", "past_key_values", "cache_position", "position_embeddings", "labels"}
    | {"encoder_hidden_states", "head_dim", "num_key_value_groups", "max_length_q", "max_length_k"}
)
"""Arguments that say nothing of the weights, or that the module itself has used before it made the call."""
_UNDERSTOOD = frozenset(
    {"module", "query", "key", "value", "attention_mask", "scaling", "softcap", "sliding_window", "s_aux"}
    | {"is_causal", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"}
)
_DENSE_ELEMENTS = 1 << 22  # of a mask that is written out; larger ones are refused


class RegistryPatch:
    """Stands before the registered implementations; see ``attnmon.capture.observe.Patch``.

    Args:
        recorder: told of each call.
        watched: the watched modules; some model files have a registry of their own.
    """

    def __init__(self, recorder: CallInterceptor, watched: Sequence[tuple[weakref.ref[nn.Module], Site]]) -> None:
        self._recorder, self._watched = recorder, watched
        modules = [reference() for reference, _ in watched]
        self._files = list(dict.fromkeys(kind.__module__ for module in modules for kind in type(module).__mro__))
        self._links = Links()
        self._describer = Describer(self._is_cross)

    def install(self) -> None:
        for table in self._tables():
            for name, function in list(table.items()):
                if name in ("sdpa", "eager") or name.startswith("paged|") or not callable(function):
                    continue  # torch-level modes see these as they are; paged attention is for inference
                self._links.put_before(Binding(table, name), partial(self._make, name), name)

    def remove(self) -> None:
        self._links.restore()
        self._describer.forget()

    def _make(self, name: str, current: Callable[..., Any], bottom: Callable[..., Any]) -> Replacement:
        describer = self._describer
        opaque: bool | Callable[[Mapping[str, Any]], bool] = True
        if bottom is _of("transformers.integrations.flash_attention", "flash_attention_forward"):
            describe = describer.flash
        elif name.startswith("flash_attention"):
            describe = describer.like_flash
        elif name == "flex_attention":
            describe, opaque = describer.flex, _hides_flex
        else:
            describe, opaque = describer.other, False
        return Replacement(self._recorder, name, current, describe, takes_module=True, opaque=opaque)

    def _is_cross(self, module: nn.Module) -> bool:
        return any(site.kind == "cross" and reference() is module for reference, site in self._watched)

    def _tables(self) -> list[_Table]:
        """The dictionaries behind the registries in use, each once."""
        if "transformers.modeling_utils" not in sys.modules:
            return []
        owners = [sys.modules.get(name) for name in ("transformers.modeling_utils", *self._files)]
        registries = {id(owner): vars(owner).get("ALL_ATTENTION_FUNCTIONS") for owner in owners if owner}
        tables: dict[int, _Table] = {}
        for registry in registries.values():
            if isinstance(registry, dict):  # before transformers 4.51
                tables[id(registry)] = registry
                continue
            for part in ("_global_mapping", "_local_mapping"):
                table = getattr(registry, part, None)
                if isinstance(table, dict):
                    tables[id(table)] = table
        return list(tables.values())


class Describer:
    """What the calls of registered implementations mean; remembers, within a step, what it derived from masks."""

    def __init__(self, is_cross: Callable[[nn.Module], bool] = lambda module: False) -> None:
        self._module_is_cross = is_cross
        self._derived: dict[tuple[str, int], tuple[Any, Any, Any]] = {}
        version = _version()
        self._inset = 1 if version >= (4, 56) else 0  # a window counts the query's own key, or did not
        self._asks_module = version < (4, 56)  # is_causal was the module's alone
        self._packs_batches = version < (4, 55)
        self._top_left = bool(_of("transformers.integrations.flash_attention", "_use_top_left_mask", False))

    def forget(self) -> None:
        """The step is over; keep no tensor."""
        self._derived.clear()

    def flash(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArgs:
        """``flash_attention_forward`` of transformers, whatever name it is registered under."""
        given = _bind(args, kwargs)
        mask, query_len = given["attention_mask"], given["query"].shape[2]
        if mask is not None and mask.dim() == 2 and given["key"].shape[2] > mask.shape[1]:
            # a static cache is longer than what it holds
            given.update(key=given["key"][:, :, : mask.shape[1]], value=given["value"][:, :, : mask.shape[1]])
        supports = _supports()
        if not supports.get("window_size", True):
            given.pop("sliding_window", None)
        if not (supports.get("s_aux", True) or supports.get("learnable_sink", True)):
            given.pop("s_aux", None)
        described = self._flash(given, packed_needs_lengths=True)
        key_len = given["key"].shape[2]
        if mask is None or query_len == 1:
            return described
        # queries are taken out by the last columns of the mask, be they of the same sequence or not
        if query_len > key_len:
            raise UnsupportedAttention("a padding mask with more queries than keys: transformers mixes up the queries")
        if query_len == key_len and not (described.get("is_cross") or self._module_is_cross(given["module"])):
            return described  # then a query is padding because its key is
        kept = self._once("queries", mask, lambda: mask.bool())[:, None, key_len - query_len :, None]
        window = described.get("attn_mask")
        return {**described, "attn_mask": kept if window is None else window & kept}

    def like_flash(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArgs:
        """Another function under the name of a flash kernel: the same conventions."""
        return self._flash(_bind(args, kwargs), packed_needs_lengths=False)

    def flex(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArgs:
        """``flex_attention_forward``: the mask says everything."""
        given = _bind(args, kwargs)
        mask, bias = given["attention_mask"], given.pop("position_bias", None)
        _check(given)
        described = _common(given)
        if mask is not None and not isinstance(mask, Tensor):
            if torch.compiler.is_compiling():
                raise UnsupportedAttention("flex_attention with sinks in a compiled graph")
            lengths = given["query"].shape[2], given["key"].shape[2]
            mask_mod = self._once("block mask", mask, lambda: mask_of(mask, *lengths, fused=True))
            return {**described, "mask_mod": mask_mod, "attn_mask": bias}
        if mask is not None:
            if mask.dim() != 4 or not mask.dtype.is_floating_point:
                raise UnsupportedAttention(f"flex_attention with a mask {list(mask.shape)} of {mask.dtype}")
            mask = mask[:, :1, :, : given["key"].shape[2]]
        if bias is not None:
            mask = bias if mask is None else mask + bias
        return {**described, "attn_mask": mask}

    def other(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArgs:
        """A function that a user registered, inside of which nothing was seen: the conventions of the interface."""
        given = _bind(args, kwargs)
        _check(given)
        described = _common(given)
        query_len, key_len = given["query"].shape[2], given["key"].shape[2]
        mask, window = given["attention_mask"], given.get("sliding_window")
        if given.get("cu_seq_lens_q") is not None:
            raise UnsupportedAttention("packed sequences in an implementation of attention that attnmon does not know")
        if mask is not None and mask.dim() == 4:
            return {**described, "attn_mask": mask}
        if window is not None and key_len > window:
            raise UnsupportedAttention("sliding_window in an implementation of attention that attnmon does not know")
        is_causal = query_len > 1 and self._is_causal(given, default=True)
        if is_causal and query_len != key_len:
            raise UnsupportedAttention("causal attention of unknown alignment: queries and keys differ in number")
        if mask is not None:
            described["key_padding_mask"] = self._padding(mask, key_len)
        return {**described, "is_causal": is_causal}

    # -- flash conventions ----------------------------------------------------------------------------------

    def _flash(self, given: dict[str, Any], *, packed_needs_lengths: bool) -> CallArgs:
        _check(given)
        described = _common(given)
        query, key, mask = given["query"], given["key"], given["attention_mask"]
        query_len, key_len = query.shape[2], key.shape[2]
        is_causal = self._is_causal(given, default=None)
        offset = key_len - query_len  # aligned bottom-right
        if self._top_left:
            is_causal = is_causal and query_len != 1
            if query_len != key_len:
                raise UnsupportedAttention("this version of flash attention aligns causal masks top-left")
        described.update(is_causal=is_causal, causal_offset=offset)
        size = given.get("sliding_window")
        if size is not None and key_len > size:
            reach = size - self._inset
            described["window"] = (reach, reach)
        if mask is not None:
            described["key_padding_mask"] = self._padding(mask, key_len)
            if query_len > key_len and (is_causal or "window" in described):
                raise UnsupportedAttention("a padding mask with more queries than keys: their alignment is not known")
            if "window" in described:
                self._compact_window(described, mask, query_len, key_len)
            return described
        boundaries = self._boundaries(given, packed_needs_lengths)
        if boundaries is not None:
            described.update(zip(("cu_seqlens", "attn_mask"), boundaries, strict=True), causal_offset=0)
            if query.shape[0] > 1:  # flattened into one
                for name in ("query", "key", "value"):
                    described[name] = described[name].transpose(0, 1).flatten(1, 2)[None]
        return described

    def _padding(self, mask: Tensor, key_len: int) -> Tensor:
        if mask.dim() != 2:
            raise UnsupportedAttention(f"a mask {list(mask.shape)} where one of [B, Lk] is expected")
        if mask.shape[1] != key_len:
            raise UnsupportedAttention(f"a padding mask for {mask.shape[1]} keys where there are {key_len}")
        hidden: Tensor = self._once("padding", mask, lambda: mask == 0)
        return hidden

    def _compact_window(self, described: CallArgs, mask: Tensor, query_len: int, key_len: int) -> None:
        """A window counts real tokens only: where padding lies between them, it reaches further."""
        contiguous = False
        if query_len > 1 and not torch.compiler.is_compiling():
            contiguous = self._once("contiguous", mask, lambda: bool(_runs(mask) <= 1))
        if contiguous:
            return
        left, right = described.pop("window")
        rank = (mask != 0).cumsum(-1)
        first = key_len - query_len
        if mask.shape[0] * query_len * key_len <= _DENSE_ELEMENTS:
            ahead = rank[:, None, None, :] - rank[:, None, first:, None]
            described["attn_mask"] = (ahead >= -left) & (ahead <= right)
        elif torch.compiler.is_compiling():
            raise UnsupportedAttention("a sliding window over long padded sequences in a compiled graph")
        else:

            def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                ahead = rank[b, j] - rank[b, i + first]
                near_enough: Tensor = (ahead >= -left) & (ahead <= right)
                return near_enough

            described["mask_mod"] = near

    def _boundaries(self, given: Mapping[str, Any], needs_lengths: bool) -> tuple[Tensor, Tensor | None] | None:
        """``cu_seqlens`` of packed sequences, given or told by positions that start again; None if not packed."""
        queries, keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
        lengths = (given.get("max_length_q"), given.get("max_length_k"))
        if queries is not None or keys is not None:
            if queries is None or keys is None or (needs_lengths and None in lengths):
                raise UnsupportedAttention("packed sequences given by only some of cu_seq_lens and max_length")
            return matched_boundaries(queries, keys)
        positions = given.get("position_ids")
        batch, query_len = given["query"].shape[0], given["query"].shape[2]
        if positions is None or query_len == 1 or positions.shape[-1] == 1:
            return None
        if batch > 1:
            if self._packs_batches:
                if torch.compiler.is_compiling() or self._starts(positions) is not None:
                    raise UnsupportedAttention("packed sequences told by position_ids in a batch of several")
            return None
        if tuple(positions.shape) != (1, query_len):
            raise UnsupportedAttention(f"position_ids of shape {list(positions.shape)}")
        if torch.compiler.is_compiling():  # one document a token at most; those that are none are empty, at the end
            index = torch.arange(query_len, device=positions.device)
            starts = torch.where(positions[0] == positions.min(), index, query_len).sort().values
            found: Tensor | None = torch.cat([starts, torch.full_like(starts[:1], query_len)])
        else:
            found = self._starts(positions)
        if found is None:
            return None
        if query_len != given["key"].shape[2]:
            raise UnsupportedAttention("packed sequences with other keys than queries")
        return found, None

    def _starts(self, positions: Tensor) -> Tensor | None:
        """Boundaries where positions start again; None if they only count up. Waits once per forward."""

        def find() -> Tensor | None:
            lowest = positions.min()
            plain = torch.arange(positions.shape[1], device=positions.device) + lowest
            if bool((positions == plain).all()):
                return None
            starts = (positions.reshape(-1) == lowest).nonzero().view(-1)
            return torch.cat([starts, torch.full_like(starts[:1], positions.numel())])

        starts: Tensor | None = self._once("starts", positions, find)
        return starts

    def _is_causal(self, given: Mapping[str, Any], *, default: bool | None) -> bool:
        said = None if self._asks_module else given.get("is_causal")
        if said is None:
            said = getattr(given["module"], "is_causal", default)
        if said is None:
            raise UnsupportedAttention("neither the call nor the module says whether it is causal")
        return bool(said)

    def _once(self, kind: str, source: Any, derive: Callable[[], Any]) -> Any:
        """What was derived from an object that all layers share; layers then share what is planned for it, too."""
        if torch.compiler.is_compiling() or (isinstance(source, Tensor) and source.is_inference()):
            return derive()
        version = getattr(source, "_version", None)
        known = self._derived.get((kind, id(source)))
        if known is None or known[0] is not source or known[1] != version:
            known = self._derived[kind, id(source)] = (source, version, derive())
        return known[2]


def _hides_flex(kwargs: Mapping[str, Any]) -> bool:
    """Whether flex attention is measured from its arguments; in a graph its own operator tells, but not of sinks."""
    return not torch.compiler.is_compiling() or kwargs.get("s_aux") is not None


def _runs(mask: Tensor) -> Tensor:
    """The largest number of runs of real tokens in a row of a padding mask."""
    real = torch.nn.functional.pad((mask != 0).int(), (1, 0))
    return (real.diff() > 0).sum(-1).max()


def _bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("module", "query", "key", "value", "attention_mask")
    if len(args) > len(names):
        raise UnsupportedAttention("an attention implementation called with more than five positional arguments")
    return {"attention_mask": None, **dict(zip(names, args, strict=False)), **kwargs}


def _check(given: Mapping[str, Any]) -> None:
    """Refuse what is not understood: it may change the weights."""
    for name, argument in given.items():
        if name in _UNDERSTOOD or name in _HARMLESS or argument is None or argument is False:
            continue
        raise UnsupportedAttention(f"the argument {name} of the attention implementation")
    for name in ("query", "key", "value"):
        if not isinstance(given[name], Tensor) or given[name].is_nested:
            raise UnsupportedAttention(f"{name} is a nested tensor")
    mask = given["attention_mask"]
    if isinstance(mask, Tensor) and mask.is_nested:
        raise UnsupportedAttention("attention_mask is a nested tensor")


def _common(given: Mapping[str, Any]) -> CallArgs:
    described: CallArgs = {
        "query": given["query"],
        "key": given["key"],
        "value": given["value"],
        "scale": number("scaling", given.get("scaling")),
        "softcap": number("softcap", given.get("softcap")),
    }
    sinks = given.get("s_aux")
    if sinks is not None:
        described["sinks"] = sinks.reshape(-1)
    if given.get("encoder_hidden_states") is not None or getattr(given["module"], "is_cross_attention", False) is True:
        described["is_cross"] = True
    return described


def _version() -> tuple[int, ...]:
    """(major, minor) of transformers."""
    found = str(_of("transformers", "__version__", "")).split(".")
    return tuple(int(part) for part in found[:2]) if len(found) > 1 else ()


def _supports() -> Mapping[str, bool]:
    """What the loaded flash kernel takes; transformers leaves out sinks and windows that it does not."""
    if torch.compiler.is_compiling():
        return {}
    process = _of("transformers.modeling_flash_attention_utils", "_process_flash_kwargs_fn")
    found: Mapping[str, bool] = getattr(process, "keywords", {}).get("supports_mapping", {})
    return found


def _of(module: str, name: str, default: Any = None) -> Any:
    """An attribute of a module, if that was imported by anyone."""
    return getattr(sys.modules.get(module), name, default)
