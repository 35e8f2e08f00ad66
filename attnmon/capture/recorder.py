"""Attaches to a model for the length of a measured step and reports each attention call with its module."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnmon.capture import flex, traced
from attnmon.capture import modules as names
from attnmon.capture.axes import Entered
from attnmon.capture.coverage import CoverageRecord, Site
from attnmon.capture.eager import EagerTracker
from attnmon.capture.eager_calls import EagerCalls
from attnmon.capture.entmax import EntmaxPatch
from attnmon.capture.flash import FlashPatch
from attnmon.capture.flex import FlexPatch
from attnmon.capture.functional import FunctionalPatch
from attnmon.capture.hooks import HookPair
from attnmon.capture.protocols import Observer, Patch
from attnmon.capture.registry import RegistryPatch
from attnmon.capture.replay import Replay
from attnmon.capture.reporter import Reporter
from attnmon.capture.running import Frame, Running, hidden_of, in_backward
from attnmon.capture.sites import by_name, coverage_of, find_sites, takes_fused_path
from attnmon.capture.torch_calls import CallMode
from attnmon.capture.traced_calls import TracedCalls, TracedSoftmax
from attnmon.errors import UnsupportedAttention


class Recorder:
    """Watches the attention modules of a model between ``start`` and ``stop``; outside, the model is untouched.

    In the first measured step every module that could make a call is hooked, and the function mode covers the whole
    step. If all of it ran eagerly, later steps hook only modules that made calls or look like attention, and the
    mode is active inside those alone. If some of it was compiled, hooks and mode stay as they were then, since a
    compiled graph is valid for exactly these. Where compiled code is known to break into several graphs (see
    ``functional``) the mode is kept inside attention modules and torch's attention functions are replaced instead.

    Args:
        model: any module, wrapped or not.
        observer: told of each call.
        include, exclude: glob patterns on canonical paths.
        with_hidden: also take the hidden states that enter a module.

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
    ) -> None:
        self._observer = observer
        self._with_hidden = with_hidden
        self._watched = find_sites(model, include, exclude)
        self._sites = [site for _, site in self._watched]
        self._order = {site.path: index for index, site in enumerate(self._sites)}
        self._running = Running()
        self._replay = Replay(self._sites, observer, self._running)
        self._traced_calls = TracedCalls(traced.register(self._replay), self._sites, self._running)
        self._reporter = Reporter(self._watched, observer, self._running, self._traced_calls)
        # functions replaced during a measured step
        self._patches: list[Patch] = [
            FlexPatch(self._reporter),
            EntmaxPatch(self._reporter),
            FlashPatch(self._reporter, [module for module, _ in self._watched]),
            RegistryPatch(self._reporter, self._watched),
            traced.CheckpointedGraphs(),
        ]
        self._functional = FunctionalPatch(self._reporter)
        self._hooks: dict[int, HookPair] = {}
        self._mode = CallMode(self._reporter.report)
        self._mode_level: int | None = None  # depth of the stack at which the mode was entered; -1: by start()
        self._known_devices: frozenset[torch.device] = frozenset()
        self._thread = threading.get_ident()
        self._was_traced = False
        self._modes_below = 0
        # who entered the mode while a graph is traced; not a number, which dynamic shapes would take for an input
        self._mode_holder: Frame | None = None
        self._wide = True
        self._careful = False
        self._saw_nothing = False  # a measured step
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
        wanted = frozenset(index for index, site in enumerate(self._sites) if self._wants_hook(index, site))
        for index in sorted(wanted):
            if index not in self._hooks:
                module = self._watched[index][0]()
                assert module is not None
                self._hooks[index] = HookPair(module, self, index)
            self._hooks[index].attach()
        for device in self._devices():
            traced.prepare(device)
        self._careful = self._may_be_compiled()
        for patch in self._patches:
            patch.install()
        if self._careful:
            self._functional.install()
        self._reporter.flex_operator = flex.operator()
        self._thread = threading.get_ident()
        self._running.active = True
        if self._wide and (self._saw_nothing or not self._careful) and torch.is_grad_enabled():
            self._enter_mode(-1)

    def _may_be_compiled(self) -> bool:
        """Whether a mode around modules could meet compiled code that breaks into several graphs."""
        if self._was_traced or not traced.graphs_were_broken():
            return self._careful  # graphs are valid for the way in which they were traced
        modules = [module for module in (reference() for reference, _ in self._watched) if module is not None]
        return any(names.is_compiled(module) for module in modules) or (
            not self.measured_steps and names.has_compiled_wrapper(modules)
        )

    def _devices(self) -> frozenset[torch.device]:
        """Where the model is; looked for until it is somewhere."""
        if not self._known_devices:
            modules = (reference() for reference, _ in self._watched)
            tensors = (tensor for module in modules if module is not None for tensor in module.parameters())
            self._known_devices = frozenset(tensor.device for tensor in tensors if tensor.device.type != "meta")
        return self._known_devices

    def _wants_hook(self, index: int, site: Site) -> bool:
        module = self._watched[index][0]()
        if module is None or takes_fused_path(module, site.inside_encoder):
            return False
        return self._wide or site.expected or bool(site.calls or site.refused)

    def stop(self) -> None:
        """Detach; the model is as it was."""
        self._running.active = False
        self._functional.remove()
        for patch in reversed(self._patches):
            patch.remove()
        self._unwind(0)
        self._leave_mode(-1)
        for hooks in self._hooks.values():
            hooks.detach()

    def close(self) -> None:
        """Detach for good."""
        self.stop()
        self._hooks.clear()

    def end_step(self, calls: int) -> None:
        """A measured step is over; it made so many calls."""
        self.measured_steps += 1
        # a step that saw nothing may have run graphs compiled before the hooks: let the mode have them traced anew
        self._saw_nothing |= calls == 0
        self._wide = self._was_traced or self._saw_nothing

    def _enter_mode(self, level: int) -> None:
        if self._mode_level is None:
            self._mode_level = level
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _leave_mode(self, level: int) -> None:
        if self._mode_level is not None and self._mode_level >= level:
            self._mode_level = None
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # -- what hooks say -------------------------------------------------------------------------------------

    def enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A watched module's forward begins."""
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():  # an exported program is the bare model
                return
            self._was_traced = True
            if self._running.active:
                hidden = hidden_of(args, kwargs) if self._with_hidden else None
                frame = self._frame(self._running.trail, index, hidden, args, kwargs)
                self._running.trail.append(frame)
                if self._sites[index].expected and self._mode_holder is None and self._mode_level is None:
                    self._mode_holder = frame
                    self._modes_below = torch._C._len_torch_function_stack()
                    self._mode.__enter__()  # type: ignore[no-untyped-call]
            return
        # activation checkpointing runs the forward again inside backward; it was counted the first time
        if not self._running.active or in_backward() or torch._C._get_tracing_state() is not None:
            return
        site = self._sites[index]
        try:
            if threading.get_ident() != self._thread:
                raise UnsupportedAttention("called from a thread other than the step's own, as nn.DataParallel does")
            self._push(index, args, kwargs)
        except Exception as error:  # nothing of ours may end the user's forward
            self._observer.fault(site, error)

    def leave(self, index: int) -> None:
        """A watched module's forward has ended."""
        if torch.compiler.is_compiling():
            if self._running.trail and not torch.compiler.is_exporting():
                if self._running.trail[-1] is self._mode_holder:
                    self._mode_holder = None
                    # the compiler loses the mode where it traces flex attention
                    if torch._C._len_torch_function_stack() > self._modes_below:
                        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._running.trail.pop().tracker.finish()
            return
        stack = self._running.stack
        if not stack or threading.get_ident() != self._thread or in_backward():
            return
        for level in range(len(stack) - 1, -1, -1):
            if stack[level].index == index:
                self._unwind(level)
                return

    def _push(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_of(args, kwargs) if self._with_hidden else None
        site = self._sites[index]
        self._running.stack.append(self._frame(self._running.stack, index, hidden, args, kwargs))
        # without gradients a mode would keep nn.MultiheadAttention from its fused path: only where it must
        # a mode around modules would meet compiled code inside them
        if site.expected or (torch.is_grad_enabled() and not self._careful):
            self._enter_mode(len(self._running.stack) - 1)

    def _frame(
        self, stack: list[Frame], index: int, hidden: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame:
        site, entered = self._sites[index], Entered(args, kwargs)
        outer = stack[-1] if stack else None
        parent = site.path.rpartition(".")[0]
        if outer is not None and not entered.has_sequences and parent == self._sites[outer.index].path:
            entered = outer.entered  # the inner part of an attention module, given queries, keys and values
        is_traced = torch.compiler.is_compiling()
        listener = (
            TracedSoftmax(self._traced_calls, site, index, entered)
            if is_traced
            else EagerCalls(site, self._observer, entered)
        )
        tracker = EagerTracker(listener, None if outer is None else outer.tracker)
        return Frame(index, tracker, hidden, entered, site.heads_hint)

    def _unwind(self, level: int) -> None:
        while len(self._running.stack) > level:
            frame = self._running.stack.pop()
            try:
                frame.tracker.finish()
            except Exception as error:
                self._observer.fault(self._sites[frame.index], error)
        if self._mode_level is not None and self._mode_level >= level and self._mode_level >= 0:
            self._leave_mode(level)
