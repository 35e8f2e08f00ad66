"""The function mode's place on torch's stack of modes, which it shares with the user's and with other monitors'.

torch's own ``__exit__`` takes off whatever is on top. Ours is taken out from where it is, so that modes may begin and
end in any order. The stack belongs to a thread: a mode that is to go while another thread runs is an orphan, does
nothing, and goes at the next occasion in its own thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class CallMode(TorchFunctionMode):
    """Passes every torch call on unchanged, then reports it.

    Args:
        report: called with function, arguments and result, after the call.
    """

    def __init__(self, report: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]) -> None:
        super().__init__()
        self._report = report

    def silence(self) -> None:
        """Report nothing any more: it has to wait for its thread to take it off the stack."""
        self._report = _nothing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            # of Tensor's methods written in Python the one that says super(), which the compiler cannot trace so
            result = args[0].unflatten(*args[1:], **kwargs)
        elif func is checkpoint and args and torch.compiler.is_compiling():
            # to the compiler a checkpointed region is one call; what is inside is to be seen all the same
            def inside(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return region(*args, **kwargs)

            region = args[0]
            result = func(inside, *args[1:], **kwargs)
        else:
            result = func(*args, **kwargs)
        self._report(func, args, kwargs, result)
        return result


def _nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    return None


_ours: weakref.WeakSet[CallMode] = weakref.WeakSet()
_orphans: weakref.WeakSet[CallMode] = weakref.WeakSet()


class Place:
    """Puts one mode on the stack and takes it out again, from wherever it is by then.

    Args:
        make: makes the mode; anew where the one before is left to another thread.
    """

    def __init__(self, make: Callable[[], CallMode]) -> None:
        self._make = make
        self._thread: int | None = None  # whose stack it is on
        self._renew()

    def _renew(self) -> None:
        self.mode = self._make()
        _ours.add(self.mode)

    def enter(self) -> None:
        """Put it on top, unless it is there."""
        sweep()
        if self._thread is None:
            _push(self.mode)
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """Take it out, if it is there."""
        if self._thread is None:
            return
        if self._thread == threading.get_ident():
            take_out({id(self.mode)})
        else:
            self.mode.silence()
            _orphans.add(self.mode)
            self._renew()
        self._thread = None

    def purge(self) -> None:
        """Take it out of this thread's stack, also where a compiled graph has left it."""
        if torch._C._len_torch_function_stack():
            take_out({id(self.mode)})
        self.leave()


def sweep() -> None:
    """Take out what should have gone while another thread ran."""
    if _orphans:
        gone = take_out({id(mode) for mode in _orphans})
        for mode in gone:
            _orphans.discard(mode)


def ours_here() -> list[Any]:
    """attnmon's modes on this thread's stack."""
    if not torch._C._len_torch_function_stack():
        return []
    return [mode for mode in _stack() if mode in _ours]


@contextmanager
def without_ours() -> Iterator[None]:
    """The stack as it is without attnmon's modes."""
    with _restored() as before:
        take_out({id(mode) for mode in before if mode in _ours})
        yield


@contextmanager
def no_modes() -> Iterator[None]:
    """An empty stack."""
    with _restored():
        _clear()
        yield


@contextmanager
def _restored() -> Iterator[list[Any]]:
    before = _stack()
    try:
        yield before
    finally:
        if before != _stack():
            _clear()
            for mode in before:
                _push(mode)


def _clear() -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


def take_out(identities: set[int]) -> list[Any]:
    """Remove modes from this thread's stack; the others keep their order. Those that were there."""
    found: list[Any] = []
    above: list[Any] = []
    for _ in range(torch._C._len_torch_function_stack()):
        mode = torch._C._pop_torch_function_stack()
        (found if id(mode) in identities else above).append(mode)
    for mode in reversed(above):
        _push(mode)
    return found


def _stack() -> list[Any]:
    return [torch._C._get_function_stack_at(level) for level in range(torch._C._len_torch_function_stack())]


def _push(mode: Any) -> None:
    torch._C._push_on_torch_function_stack(mode)
