"""Which modules of a model are attention, and what they are called."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn

from attnmon.errors import AttnmonError

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ATTENTION_CLASS = re.compile(r"attention|attn|attend(?!ance)|mha\b|multihead", re.IGNORECASE)
_ATTENTION_CODE = re.compile(r"attention|attn|attend(?!ance)|softmax|entmax", re.IGNORECASE)
_MOST_FUNCTIONS = 50  # looked into, of a forward that names no attention itself
_NOT_ATTENTION = re.compile(r"mask|bias|embedding|norm|dropout|output|pool", re.IGNORECASE)
_MORE_HEADS = ("n_local_heads", "num_query_heads", "num_q_heads", "n_q_heads", "num_attn_heads", "head_num", "nh")
_CROSS = re.compile(r"cross|encoder_attn|enc_?dec|encoder_decoder", re.IGNORECASE)


def canonical_path(name: str) -> str:
    """The path as in the bare model: without what DDP, FSDP, compilation or checkpointing wrap around.

    >>> canonical_path("module._orig_mod.h.0._checkpoint_wrapped_module.attn")
    'h.0.attn'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(canonical path, module) of every module once, in the model's order, wrappers left out.

    A child that is really called ``module`` keeps its name: only names that a known wrapper class gives its
    one child are dropped.
    """
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if not _is_wrapper(module):
            yield path, module
        for name, child in module._modules.items():
            if child is None:
                continue
            if _is_wrapper(module) and name in _WRAPPERS:
                yield from visit(child, path)
            else:
                yield from visit(child, f"{path}.{name}" if path else name)

    yield from visit(model, "")


def _is_wrapper(module: nn.Module) -> bool:
    kind = type(module).__name__
    if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule"):
        return True
    return kind == "CheckpointWrapper" or any(
        base.__name__ in ("ActivationWrapper", "DistributedDataParallel") for base in type(module).__mro__
    )


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module's class is named as attention classes are."""
    kind = type(module).__name__
    return bool(_ATTENTION_CLASS.search(kind)) and not _NOT_ATTENTION.search(kind)


def may_call_attention(module: nn.Module) -> bool:
    """Whether a module could itself make an attention call: not a plain layer of torch.nn without children."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if type(module).__module__.startswith("torch.nn.modules."):
        return any(child is not None for child in module._modules.values()) and not isinstance(
            module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        )
    return True


def mentions_attention(module: nn.Module) -> bool:
    """Whether the class's forward, or a function it calls, names attention or softmax, as a plain function would be."""
    return _mentions(inspect.getattr_static(type(module), "forward", None), type(module), set())


def _mentions(function: Any, kind: type[nn.Module], seen: set[CodeType]) -> bool:
    """``kind``: where ``self.method`` is looked up; ``seen``: code looked at already."""
    function = inspect.unwrap(function) if callable(function) else None
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code in seen or len(seen) >= _MOST_FUNCTIONS:
        return False
    seen.add(code)
    names = _names(code)
    if any(_ATTENTION_CODE.search(name) for name in names):
        return True
    known = getattr(function, "__globals__", {})
    called = [known.get(name) or inspect.getattr_static(kind, name, None) for name in names]
    return any(
        _mentions(other, kind, seen)
        for other in called
        if inspect.isfunction(other) and not other.__module__.startswith("torch.")
    )


def _names(code: CodeType) -> list[str]:
    names = [*code.co_names, *code.co_freevars]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _names(inner)
    return names


def static_attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module or of its class, without running code of the user's; None where there is none.

    Reading a property, or a name that ``__getattr__`` deals with, could raise, warn, or change something.
    """
    if name in module.__dict__:
        return module.__dict__[name]
    found = inspect.getattr_static(type(module), name, None)
    return None if isinstance(found, property) else found


def head_count(module: nn.Module) -> int | None:
    """The number of query heads that the module's attributes state, under the names in use."""
    for name in ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads", "nheads", *_MORE_HEADS):
        count = static_attribute(module, name)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def kind_of(path: str, module: nn.Module) -> str:
    """ "cross" if the path or the class says so, else "self"; a call itself may show more."""
    last = path.rsplit(".", 1)[-1]
    is_cross = static_attribute(module, "is_cross_attention") is True
    return "cross" if is_cross or _CROSS.search(last) or _CROSS.search(type(module).__name__) else "self"


def check_patterns(name: str, patterns: Sequence[str] | str | None, paths: Sequence[str]) -> tuple[str, ...] | None:
    """Validate ``include`` or ``exclude``: glob patterns, each of which has to match some module.

    Raises:
        AttnmonError: a pattern matches nothing; the message shows paths that exist.
    """
    if patterns is None:
        return None
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not given or not all(isinstance(pattern, str) for pattern in given):
        raise AttnmonError(f"{name} must be glob patterns on module paths, such as '*.attn'; got {patterns!r}")
    for pattern in given:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            shown = ", ".join(repr(path) for path in paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise AttnmonError(f"{name} pattern {pattern!r} matches no attention module; there are: {shown}")
    return given


def selected(path: str, include: tuple[str, ...] | None, exclude: tuple[str, ...] | None) -> bool:
    """Whether ``path`` is to be watched."""
    if include is not None and not any(fnmatch.fnmatchcase(path, pattern) for pattern in include):
        return False
    return exclude is None or not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)
