"""The two hooks of a watched module. They survive copying and saving a model as hooks that do nothing."""

from __future__ import annotations

from typing import Any, Protocol


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


class _Inert:
    """What a copied or unpickled model has in the place of a hook."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None
