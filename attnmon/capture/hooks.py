"""The two hooks of a watched module.

No copy of a model has them (see ``process_wide``). Where something copies a table of hooks by itself, what arrives
there does nothing and needs no attnmon.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnmon.capture.below import below_modes
from attnmon.capture.coverage import Site


class Watcher(Protocol):
    """What hooks talk to."""

    def enter(self, hook: BeforeForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def leave(self, hook: AfterForward) -> None: ...


def _nothing() -> Callable[..., None]:
    return nullcontext().__exit__


class _Hook:
    """What both have in common."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing()

    def __copy__(self) -> Callable[..., None]:
        return _nothing()

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (nullcontext(), "__exit__"))


class BeforeForward(_Hook):
    """Says that a module's forward begins.

    What a compiler may read of it is the same for all layers that are alike, but for ``token``, a tensor and so an
    input of the graph: blocks that are compiled one by one share their graph.

    Args:
        watcher: told.
        index: of the site, for eager code.
        site: the module's.
        number: of the watcher, for operators in compiled graphs.
    """

    def __init__(self, watcher: Watcher, index: int, site: Site, number: int) -> None:
        self.watcher, self.index = watcher, index
        self.expected, self.excluded, self.heads_hint = site.expected, site.excluded, site.heads_hint
        self.depth = site.depth
        with below_modes():
            self.token: Tensor = torch.tensor([number, index], dtype=torch.int64, device="cpu")

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.watcher.enter(self, args, kwargs)


class AfterForward(_Hook):
    """Says that a module's forward has ended, by an exception too."""

    def __init__(self, watcher: Watcher, index: int) -> None:
        self.watcher, self.index = watcher, index

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.watcher.leave(self)


def is_ours(hook: object) -> bool:
    """Whether a hook is attnmon's."""
    return type(hook) is BeforeForward or type(hook) is AfterForward


def free_key(modules: list[nn.Module]) -> int:
    """A key under which none of the modules has a hook.

    Compiled blocks share a graph only if their hooks have the same key; torch's own keys count up from 0.
    """
    taken: set[Any] = set()
    for module in modules:
        taken.update(module._forward_hooks, module._forward_pre_hooks)
    key = -1
    while key in taken:
        key -= 1
    return key


class HookPair:
    """Both hooks of one module, put in and taken out any number of times under the same key.

    A graph that was compiled with hooks in place is valid for exactly this key, one that was compiled without them
    for any: so between measured steps a model has no hooks and runs the graph that it has anyway.

    Args:
        module: a module that takes hooks.
        before, after: the hooks.

    Raises:
        RuntimeError: it takes none, as scripted modules.
    """

    def __init__(self, module: nn.Module, before: BeforeForward, after: AfterForward) -> None:
        handles = (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        )
        self.before = before
        self._entries: list[tuple[Any, Any]] = []  # tables of the module, and what is to be in them
        self._key: int | None = None
        for handle in handles:
            for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                holder = reference()
                if holder is not None and handle.id in holder:
                    self._entries.append((holder, holder.pop(handle.id)))

    def attach(self, key: int) -> None:
        """Put them in, before what others want before a forward and after what they want after it."""
        self.detach()
        self._key = key
        for holder, entry in self._entries:
            holder[key] = entry
            if isinstance(entry, BeforeForward):
                holder.move_to_end(key, last=False)

    def detach(self) -> None:
        """Take them out."""
        if self._key is None:
            return
        for holder, entry in self._entries:
            if holder.get(self._key) is entry:
                del holder[self._key]
        self._key = None
