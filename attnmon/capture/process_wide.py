"""What a measured step changes of the process, once for all monitors.

Monitors may begin and end their steps in any order and on any thread. The first that begins puts these in, the last
that ends takes them out:

- copies of a model, pickled ones too, leave attnmon's hooks out, and scripting or exporting one sees it bare;
- ``torch.overrides.has_torch_function`` does not count attnmon's modes, so that torch's Transformer layers and
  ``nn.MultiheadAttention`` choose the path that they choose without it;
- compiled code: checkpointed regions may be traced though a hook notes which module runs, and where the compiler
  raises while something of attnmon is traced, the call goes on without it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.overrides
from torch import Tensor, nn

from attnmon.capture.hooks import is_ours
from attnmon.capture.mode_stack import CallMode, ours_here, sweep, without_ours


class StepWatcher(Protocol):
    """What is asked of a recorder while its step is measured."""

    @property
    def thread(self) -> int:
        """The thread of the measured step."""

    def put_in(self, level: int | None = None) -> None:
        """Put hooks, replaced functions and the mode in their places."""

    def take_out(self) -> int | None:
        """Take them out; the answer is what ``put_in`` needs to go on."""

    def restore_hooks(self) -> None:
        """Put back hooks that were withheld from a layer of torch."""

    def tracing_begins(self) -> None:
        """A graph is about to be traced."""

    def leave_alone(self, modules: list[nn.Module] | None, why: str) -> bool:
        """Leave modules alone from now on, or all; whether that changes anything."""


_active: weakref.WeakSet[StepWatcher] = weakref.WeakSet()
_lock = threading.RLock()


def _here() -> list[StepWatcher]:
    """The recorders whose measured step runs on this thread."""
    return [recorder for recorder in list(_active) if recorder.thread == threading.get_ident()]


def activate(recorder: StepWatcher) -> None:
    """A measured step of this recorder begins."""
    with _lock:
        sweep()
        _active.add(recorder)
        _Changes.put_in()


def deactivate(recorder: StepWatcher) -> None:
    """It has ended."""
    with _lock:
        sweep()
        _active.discard(recorder)
        if not len(_active):
            _Changes.take_out()


@contextmanager
def suspended() -> Iterator[None]:
    """Every model and function as it is without attnmon, on this thread."""
    here = _here()
    with _lock:
        levels = [recorder.take_out() for recorder in here]
        _Changes.take_out()
    try:
        yield
    finally:
        with _lock:
            for recorder, level in zip(here, levels, strict=True):
                if recorder in _active:
                    recorder.put_in(level)
            if len(_active):
                _Changes.put_in()


class _Change:
    """An attribute that holds another value while steps are measured.

    Args:
        owner: a module's name in ``sys.modules``, or a class.
        name: of the attribute; nothing happens where the owner has none, except for a class with ``adds``.
        make: from the value as it was to the one in its place.
        adds: the attribute may be inherited; then it is deleted afterwards.
    """

    def __init__(self, owner: str | type, name: str, make: Callable[[Any], Any], *, adds: bool = False) -> None:
        self._owner, self._name, self._make, self._adds = owner, name, make, adds
        self._before: Any = None
        self._ours: Any = None
        self._was_own = True  # not inherited

    def put_in(self) -> None:
        """Put ours in its place, unless it is there."""
        owner = sys.modules.get(self._owner) if isinstance(self._owner, str) else self._owner
        if owner is not None and self._ours is None and hasattr(owner, self._name):
            self._was_own = self._name in vars(owner)
            self._before = getattr(owner, self._name)
            self._ours = self._make(self._before)
            setattr(owner, self._name, self._ours)

    def take_out(self) -> None:
        """As it was, unless someone else has put something there meanwhile."""
        if self._ours is None:
            return
        owner = sys.modules.get(self._owner) if isinstance(self._owner, str) else self._owner
        if getattr(owner, self._name, None) is self._ours:
            if self._was_own or not self._adds:
                setattr(owner, self._name, self._before)
            else:
                delattr(owner, self._name)
        self._ours = self._before = None


# -- copies -------------------------------------------------------------------------------------------------

_TABLES = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip


def _reducing_bare(original: Callable[..., Any]) -> Callable[..., Any]:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = original(self, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        return (*reduced[:2], _bare(reduced[2]), *reduced[3:])

    return __reduce_ex__


def _bare(state: Any) -> Any:
    """The state of a module without attnmon's hooks; tables that hold none stay the ones they are."""
    if isinstance(state, tuple) and len(state) == 2:  # with slots
        return (_bare(state[0]), state[1])
    if not isinstance(state, Mapping):
        return state
    tables = [table for name in _TABLES[::2] if isinstance(table := state.get(name), Mapping)]
    ours = {key for table in tables for key, hook in table.items() if is_ours(hook)}
    if not ours:
        return state
    bare = dict(state)
    for name in _TABLES:
        table = state.get(name)
        if isinstance(table, Mapping):
            bare[name] = type(table)((key, value) for key, value in table.items() if key not in ours)  # type: ignore[call-arg]
    return bare


def _suspending(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return original(*args, **kwargs)

    return call


# -- torch's own choice of a path ---------------------------------------------------------------------------


def _ignoring_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def has_torch_function(relevant_args: Any) -> bool:
        if torch.compiler.is_compiling():
            # a graph is traced with our mode in its place; another one's, or a subclass, counts as it does bare
            if torch._C._len_torch_function_stack() > 1:
                return bool(original(relevant_args))
            for argument in relevant_args:
                if argument is not None and type(argument) is not Tensor and type(argument) is not nn.Parameter:
                    return bool(original(relevant_args))
            return False
        # who asks has looked at the hooks before
        for recorder in _here():
            recorder.restore_hooks()
        if not ours_here():
            return bool(original(relevant_args))
        with without_ours():
            return bool(original(relevant_args))

    return has_torch_function


# -- compiled code ------------------------------------------------------------------------------------------

_OURS = os.sep.join(os.path.abspath(__file__).split(os.sep)[:-2]) + os.sep  # the package


def _going_on_bare(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        here = _here()
        if not here or getattr(self._torchdynamo_orig_backend, "_export", False):
            return original(self, frame, cache_entry, frame_state)
        if not frame.f_code.co_filename.startswith(_OURS):
            for recorder in here:
                recorder.tracing_begins()
        try:
            with _checkpointed_regions_may_note():
                return original(self, frame, cache_entry, frame_state)
        except Exception as error:
            # the frame has not begun to run: it can be compiled once more
            said = (str(error).strip().splitlines() or [""])[0]
            why = f"the compiler raised {type(error).__name__} where it traced attnmon's hooks: {said}"[:300]
            modules = _modules_of(frame)
            changed = [recorder.leave_alone(modules, why) for recorder in here]
            if True not in changed:
                raise
            if frame.f_code.co_filename.startswith(_OURS):  # a hook, as a frame of its own
                return _run_as_it_is()
        return original(self, frame, cache_entry, frame_state)

    return __call__


def _checkpointed_regions_may_note() -> AbstractContextManager[Any]:
    """Hooks note which module runs; the compiler takes that for a side effect that a recomputation might lack."""
    config: Any = sys.modules["torch._dynamo.config"]
    option = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    return config.patch(option, True) if hasattr(config, option) else nullcontext()


def _run_as_it_is() -> Any:
    """What the compiler is told of a frame that it is to leave alone this once, with all that it calls."""
    kind: Any = getattr(sys.modules["torch._dynamo.convert_frame"], "ConvertFrameReturn", None)
    if kind is None:
        return None
    told = kind(apply_to_code=False)
    skip = told.frame_exec_strategy.cur_action
    told.frame_exec_strategy = type(told.frame_exec_strategy)(skip, skip)
    return told


def _modules_of(frame: Any) -> list[nn.Module] | None:
    """The modules that a frame knows by a name of its own; None if there are none."""
    found = [value for value in list(frame.f_locals.values()) if isinstance(value, nn.Module)]
    return found or None


class _Changes:
    """All of them."""

    _all: tuple[_Change, ...] = ()

    @classmethod
    def put_in(cls) -> None:
        for change in cls._all or cls._prepare():
            change.put_in()

    @classmethod
    def take_out(cls) -> None:
        for change in cls._all:
            change.take_out()

    @classmethod
    def _prepare(cls) -> tuple[_Change, ...]:
        """Once a process. The compiler is imported now: a table that it made later would hold what stands here."""
        changes = [
            _Change(nn.Module, "__reduce_ex__", _reducing_bare, adds=True),
            _Change("torch.jit._script", "_script_impl", _suspending),
            _Change("torch.jit._recursive", "create_script_module", _suspending),
            _Change("torch.jit._trace", "_trace_impl", _suspending),
            _Change("torch.jit._trace", "trace_module", _suspending),
            _Change("torch.export", "export", _suspending),
        ]
        try:
            convert = importlib.import_module("torch._dynamo.convert_frame")
            importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
            importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable._get_handlers()
            eval_frame = importlib.import_module("torch._dynamo.eval_frame")
        except Exception:  # no compiler here, or one of another make
            convert = None
        if convert is not None:
            # compiled as a frame of its own, it answers one property of a tensor with another's value
            skip_code = getattr(eval_frame, "skip_code", None)
            if skip_code is not None:
                skip_code(CallMode.__torch_function__.__code__)
            changes += [
                _Change("torch.overrides", "has_torch_function", _ignoring_ours),
                _Change(convert.CatchErrorsWrapper, "__call__", _going_on_bare),
            ]
        cls._all = tuple(changes)
        return cls._all
