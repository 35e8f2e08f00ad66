"""Attaches to a model for the length of a measured step and reports each attention call with its module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnmon.capture import process_wide
from attnmon.capture.compiled import operators
from attnmon.capture.compiled.emitted import GraphCalls, GraphSoftmax
from attnmon.capture.compiled.replay import Replay
from attnmon.capture.coverage import CoverageRecord, Site
from attnmon.capture.deferred import DeferredCalls
from attnmon.capture.frames import ActiveForwards, ForwardFrame, hidden_of, in_backward
from attnmon.capture.hooked_modules import HookedModules
from attnmon.capture.hooks import AfterForward, BeforeForward
from attnmon.capture.mode_stack import CallMode, Place, ours_here
from attnmon.capture.observe import Observer, Patch
from attnmon.capture.reporter import Reporter
from attnmon.capture.routes import flex
from attnmon.capture.routes.eager_calls import EagerCalls
from attnmon.capture.routes.eager_tracker import EagerTracker
from attnmon.capture.routes.entmax import EntmaxPatch
from attnmon.capture.routes.flash import FlashPatch
from attnmon.capture.routes.flex import FlexPatch
from attnmon.capture.routes.head_axes import ModuleInputs
from attnmon.capture.routes.transformers_registry import RegistryPatch
from attnmon.capture.sites import by_name, coverage_of, find_sites
from attnmon.errors import UnsupportedAttention


class Recorder:
    """Watches the attention modules of a model between ``start`` and ``stop``; outside, the model is untouched.

    Inside the user's forward calls are only noted; they are measured when the outermost watched forward is over (see
    ``deferred``). In the first measured step every module that could make a call is hooked. Later steps hook only
    modules that made calls or look like attention, unless some of the model was compiled: then hooks stay as they
    were, since a compiled graph is valid for exactly these. The function mode is on inside hooked modules; where
    graphs may have been compiled before monitoring, it covers the whole first step, so that they are traced anew.

    Args:
        model: any module, wrapped or not.
        observer: told of each call.
        include, exclude: glob patterns on canonical paths.
        with_hidden: also take the hidden states that enter a module.
        at_once: measure each call as it is made, below all modes, and hold none.
        on_left_alone: called with a sentence when compiled code is left alone from now on.

    Raises:
        AttnmonError: no module of the model is or mentions attention, or a pattern matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        observer: Observer,
        *,
        include: Sequence[str] | str | None = None,
        exclude: Sequence[str] | str | None = None,
        with_hidden: bool = False,
        at_once: bool = False,
        on_left_alone: Callable[[str], None] | None = None,
    ) -> None:
        self._observer = observer
        self._with_hidden = with_hidden
        self._on_left_alone = on_left_alone
        self._watched = find_sites(model, include, exclude)
        self._sites = [site for _, site in self._watched]
        self._order = {site.path: index for index, site in enumerate(self._sites)}
        self._running = ActiveForwards()
        self._deferred = DeferredCalls(observer, at_once=at_once)
        self._replay = Replay(self._sites, observer, self._running)  # held here alone
        self._number = operators.register(self._replay)
        self._graph_calls = GraphCalls(self._running, self._number)
        self._reporter = Reporter(self._watched, observer, self._running, self._graph_calls, self._deferred)
        # functions replaced during a measured step
        self._patches: list[Patch] = [
            FlexPatch(self._reporter),
            EntmaxPatch(self._reporter),
            FlashPatch(self._reporter, [module for module, _ in self._watched]),
            RegistryPatch(self._reporter, self._watched),
        ]
        self._hooked = HookedModules(self._watched, self._number, self._running)
        report = self._reporter.report
        self._place = Place(lambda: CallMode(report))
        self._mode = self._place.mode
        self._mode_level: int | None = None  # depth of the stack at which the mode was entered; -1: by start()
        self._known_devices: frozenset[torch.device] = frozenset()
        self._thread = threading.get_ident()
        self._was_traced = False
        self._modes_below = 0
        # who entered the mode while a graph is traced; not a number, which dynamic shapes would take for an input
        self._mode_holder: ForwardFrame | None = None
        self._wide = True
        self._saw_nothing = False  # a measured step
        self._leaves_some_alone = False  # from some compiled code
        self.measured_steps = 0

    # -- what was seen --------------------------------------------------------------------------------------

    @property
    def all_sites(self) -> list[Site]:
        """Every place that is or may be watched, in the model's order."""
        return self._sites

    def coverage(self) -> list[CoverageRecord]:
        """Records of the sites that are attention or were seen to make attention calls, in the model's order."""
        return coverage_of(self._sites, self.measured_steps)

    def in_order(self, paths: Iterable[str]) -> list[str]:
        """Module paths as they come in the model; by name where some are of another rank's part of it."""
        paths = list(paths)
        if all(path in self._order for path in paths):
            return sorted(paths, key=self._order.__getitem__)
        return sorted(paths, key=by_name)

    # -- a measured step ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach; until ``stop`` every forward outside of backward is watched."""
        if self._running.active:
            return
        self._hooked.choose(self, self._wide)
        for device in self._devices():
            operators.prepare(device)
        self._thread = threading.get_ident()
        self._running.active = True
        process_wide.activate(self)
        self.put_in()

    def stop(self) -> None:
        """Measure what waits, and detach; the model is as it was."""
        if self._running.active:
            self._unwind(0)
            self._deferred.measure()
        self._running.active = False
        self._running.stack.clear()
        self._running.trace_stack.clear()
        self._running.suppressed = 0
        self._mode_holder = None
        self._deferred.drop()
        process_wide.deactivate(self)
        self.take_out()

    def abandon(self) -> None:
        """Detach, and forget what waits."""
        self._deferred.drop()
        self._running.stack.clear()
        self.stop()

    def close(self) -> None:
        """Detach for good."""
        self.abandon()
        self._hooked.clear()

    def put_in(self, level: int | None = None) -> None:
        """Hooks, replaced functions and the mode, as they are while a step is measured.

        Args:
            level: what ``take_out`` returned, to go on from there.
        """
        self._hooked.attach()
        for patch in self._patches:
            patch.install()
        self._reporter.flex_operator = flex.operator()
        if level is not None:
            self._enter_mode(level)
        elif self._wide and not self._leaves_some_alone and torch.is_grad_enabled():
            self._enter_mode(-1)

    def take_out(self) -> int | None:
        """Undo ``put_in``; where the mode was entered."""
        level = self._mode_level
        for patch in reversed(self._patches):
            patch.remove()
        self._leave_mode(-1)
        self._place.purge()
        self._mode = self._place.mode  # another one if that is left to its thread
        self._hooked.detach()
        return level

    def end_step(self, calls: int) -> None:
        """A measured step is over; it made so many calls."""
        self.measured_steps += 1
        # a step that saw nothing may have run graphs compiled before the hooks: let the mode have them traced anew
        self._saw_nothing |= calls == 0
        self._wide = self._was_traced or self._saw_nothing

    def _devices(self) -> frozenset[torch.device]:
        """Where the model is; looked for until it is somewhere."""
        if not self._known_devices:
            modules = (reference() for reference, _ in self._watched)
            tensors = (tensor for module in modules if module is not None for tensor in nn.Module.parameters(module))
            self._known_devices = frozenset(tensor.device for tensor in tensors if tensor.device.type != "meta")
        return self._known_devices

    # -- the mode -------------------------------------------------------------------------------------------

    def _enter_mode(self, level: int) -> None:
        if self._mode_level is None:
            self._mode_level = level
            self._place.enter()

    def _leave_mode(self, level: int) -> None:
        if self._mode_level is not None and self._mode_level >= level:
            self._mode_level = None
            self._place.leave()

    # -- what process-wide changes ask for ----------------------------------------------------------------

    @property
    def thread(self) -> int:
        """The thread of the measured step."""
        return self._thread

    def restore_hooks(self) -> None:
        """Put back hooks that were withheld from a layer of torch."""
        self._hooked.restore()

    def tracing_begins(self) -> None:
        """A graph is about to be traced: with the hooks that there are, for good."""
        self._hooked.tracing_begins()

    def leave_alone(self, modules: Sequence[nn.Module] | None, why: str) -> bool:
        """Leave the modules alone from now on, or all if it is not known which; whether that changes anything."""
        changed = any(mode is self._mode for mode in ours_here())
        changed |= self._hooked.leave_alone(modules, why)
        if changed:
            self._mode_level, self._mode_holder = None, None
            self._place.purge()
            self._leaves_some_alone = True
            self._running.trace_stack.clear()
            if self._on_left_alone is not None:
                self._on_left_alone(why)
        return changed

    # -- what hooks say -------------------------------------------------------------------------------------

    def enter(self, hook: BeforeForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A watched module's forward begins."""
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():  # an exported program is the bare model
                return
            self._was_traced = True
            if self._running.active:
                hidden = hidden_of(args, kwargs) if self._with_hidden else None
                frame = self._frame(self._running.trace_stack, hook, hidden, args, kwargs)
                self._running.trace_stack.append(frame)
                if hook.expected and self._mode_holder is None and self._mode_level is None:
                    self._mode_holder = frame
                    self._modes_below = torch._C._len_torch_function_stack()
                    self._mode.__enter__()  # type: ignore[no-untyped-call]
            return
        # activation checkpointing runs the forward again inside backward; it was counted the first time
        if not self._running.active or in_backward() or torch._C._get_tracing_state() is not None:
            return
        site = self._sites[hook.index]
        if site.left_alone:
            return
        try:
            if threading.get_ident() != self._thread:
                raise UnsupportedAttention("called from a thread other than the step's own, as nn.DataParallel does")
            with torch._C.DisableTorchFunction():
                self._push(hook, args, kwargs)
        except Exception as error:  # nothing of ours may end the user's forward
            self._observer.fault(site, error)

    def leave(self, hook: AfterForward) -> None:
        """A watched module's forward has ended."""
        if torch.compiler.is_compiling():
            if self._running.trace_stack and not torch.compiler.is_exporting():
                if self._running.trace_stack[-1] is self._mode_holder:
                    self._mode_holder = None
                    # the compiler loses the mode where it traces flex attention
                    if torch._C._len_torch_function_stack() > self._modes_below:
                        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._running.trace_stack.pop().tracker.finish()
            return
        stack = self._running.stack
        if not stack or threading.get_ident() != self._thread or in_backward():
            return
        with torch._C.DisableTorchFunction():
            for level in range(len(stack) - 1, -1, -1):
                if stack[level].index == hook.index:
                    self._unwind(level)
                    break
        if not stack:
            self._deferred.measure()

    def _push(self, hook: BeforeForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.restore_hooks()
        if self._hooked.withheld_for(hook.index, args, kwargs):
            return
        hidden = hidden_of(args, kwargs) if self._with_hidden else None
        frame = self._frame(self._running.stack, hook, hidden, args, kwargs)
        frame.inside = len(self._running.trace_stack)
        self._running.stack.append(frame)
        # a mode around compiled code would have it traced with what it could not be traced with
        if hook.expected or not self._leaves_some_alone:
            self._enter_mode(len(self._running.stack) - 1)

    def _frame(
        self,
        stack: list[ForwardFrame],
        hook: BeforeForward,
        hidden: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ForwardFrame:
        inputs = ModuleInputs(args, kwargs)
        outer = stack[-1] if stack else None
        if outer is not None and not inputs.has_sequences and hook.depth == outer.hook.depth + 1:
            inputs = outer.inputs  # the inner part of an attention module, given queries, keys and values
        listener: Any
        if torch.compiler.is_compiling():
            listener = GraphSoftmax(self._graph_calls, hook, inputs)
        else:
            listener = EagerCalls(self._sites[hook.index], self._observer, inputs)
        tracker = EagerTracker(listener, None if outer is None else outer.tracker)
        return ForwardFrame(hook, tracker, hidden, inputs, hook.heads_hint)

    def _unwind(self, level: int) -> None:
        while len(self._running.stack) > level:
            frame = self._running.stack.pop()
            try:
                frame.tracker.finish()
            except Exception as error:
                self._observer.fault(self._sites[frame.index], error)
        if self._mode_level is not None and self._mode_level >= level and self._mode_level >= 0:
            self._leave_mode(level)
