"""The two hooks of a watched module. They survive copying and saving a model as hooks that do nothing."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Watcher(Protocol):
    """What hooks talk to."""

    def enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def leave(self, index: int) -> None: ...


class BeforeForward:
    """Says that a module's forward begins."""

    def __init__(self, watcher: Watcher, index: int) -> None:
        self.watcher, self.index = watcher, index

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.watcher.enter(self.index, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Inert, ())


class AfterForward:
    """Says that a module's forward has ended, by an exception too."""

    def __init__(self, watcher: Watcher, index: int) -> None:
        self.watcher, self.index = watcher, index

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.watcher.leave(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Inert, ())


class HookPair:
    """Both hooks of one module, put in and taken out any number of times under the same keys.

    A graph that was compiled with hooks in place is valid for exactly these keys and objects, one that was compiled
    without them for any: so between measured steps a model has no hooks and runs the graph that it has anyway.
    """

    def __init__(self, module: nn.Module, watcher: Watcher, index: int) -> None:
        before, after = BeforeForward(watcher, index), AfterForward(watcher, index)
        handles = (
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        )
        self._entries: list[tuple[Any, int, Any]] = []
        for handle in handles:
            for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
                holder = reference()
                if holder is not None and handle.id in holder:
                    self._entries.append((holder, handle.id, holder[handle.id]))

    def attach(self) -> None:
        """Put them in, before what others want before a forward and after what they want after it."""
        for holder, key, entry in self._entries:
            holder[key] = entry
            if isinstance(entry, BeforeForward):
                holder.move_to_end(key, last=False)

    def detach(self) -> None:
        """Take them out."""
        for holder, key, _ in self._entries:
            holder.pop(key, None)


class _Inert:
    """What a copied or unpickled model has in the place of a hook."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
