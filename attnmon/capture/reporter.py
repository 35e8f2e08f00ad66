"""Attention calls as they are made: those that the function mode sees, and those of replaced functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attnmon.capture.below import autocast_dtype, below_modes, plain
from attnmon.capture.compiled.emitted import GraphCalls
from attnmon.capture.deferred import DeferredCalls
from attnmon.capture.frames import ActiveForwards, Context, ForwardFrame, in_backward
from attnmon.capture.observe import Describe, Normalized, Observer, observe_call
from attnmon.capture.routes.arguments import without_wrapping
from attnmon.capture.routes.torch_calls import ROUTES, Route
from attnmon.capture.sites import Watched
from attnmon.errors import UnsupportedAttention

NOT_FUSED = (
    "a call of torch's encoder layer in evaluation mode and without gradients; only its fused kernel was awaited"
)
UNFOLLOWED = "its compiled code cannot be followed from the module's inputs to the attention call"


class Reporter:
    """Notes the calls of what is running, or leaves operators for them in a graph that is being traced.

    Args:
        watched: the watched modules with their sites, by index.
        observer: told of each call.
        running: what runs now.
        graph_calls: leaves operators in graphs.
        deferred: where calls wait until the forward is over.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        observer: Observer,
        running: ActiveForwards,
        graph_calls: GraphCalls,
        deferred: DeferredCalls,
    ) -> None:
        self._watched, self._observer, self._running, self._graph_calls = watched, observer, running, graph_calls
        self._deferred = deferred
        self._sites = [site for _, site in watched]
        self.flex_operator: Any = None  # the higher-order operator, as graphs call it

    def report(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch call was made under the mode."""
        running = self._running
        if running.suppressed:
            return
        if torch.compiler.is_compiling():
            if func is self.flex_operator:
                self._graph_calls.rows(args)
            elif running.trace_stack:
                self._graph_calls.report(func, args, kwargs, result)
            elif func in ROUTES and running.stack:
                self._graph_calls.refusal(running.stack[-1].hook, UNFOLLOWED, args[0].device)
            return
        if not running.active or not (running.stack or running.trace_stack or running.withheld):
            return
        with torch._C.DisableTorchFunction():  # looking at a shape is a call that a mode of the user's would see
            route = ROUTES.get(func)
            # compiled code has broken into several graphs in the middle of a module
            if len(running.trace_stack) > (running.stack[-1].inside if running.stack else 0):
                site = self._sites[running.trace_stack[-1].index]
                if route is not None and not (site.excluded or site.child_left_alone):
                    self._observer.fault(site, UnsupportedAttention(UNFOLLOWED))
                return
            if running.withheld:  # a layer in evaluation mode has chosen not to be fused, for a reason of its own
                if route is not None:
                    expected = [self._sites[index] for index in running.withheld if self._sites[index].expected]
                    self._observer.fault(expected[-1], UnsupportedAttention(NOT_FUSED))
                return
            frame = running.stack[-1]
            if route is not None:
                self._note(frame, frame.index, route, args, kwargs)
                return
            try:
                frame.tracker.saw(func, args, kwargs, result)
            except Exception as error:
                self._observer.fault(self._sites[frame.index], error)

    def intercept(
        self,
        route: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Describe,
        module: nn.Module | None = None,
        *,
        opaque: bool = True,
    ) -> Any:
        """See ``attnmon.capture.observe.CallInterceptor``."""
        running = self._running
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)  # the compiler runs a graph that was traced before
        seen = -1 if opaque else self._seen()
        running.suppressed += opaque
        try:
            result = original(*args, **kwargs)
        finally:
            running.suppressed -= opaque
        if not opaque and self._seen() != seen:
            return result
        if torch.compiler.is_compiling():
            if running.active and running.trace_stack and not running.suppressed:
                self._graph_calls.replaced(running.trace_stack[-1], route, args, kwargs, describe)
            return result
        if running.suppressed or not running.active or in_backward() or not running.stack:
            return result
        with torch._C.DisableTorchFunction():
            found = Route(route, lambda args, kwargs, sample_sequences, autocast: describe(args, kwargs))
            self._note(running.stack[-1], self._index_of(module), found, args, kwargs)
        return result

    def intercept_normalizer(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Callable[[Any], Normalized],
    ) -> Any:
        """See ``attnmon.capture.observe.CallInterceptor``."""
        running = self._running
        running.suppressed += 1
        try:
            result = original(*args, **kwargs)
        finally:
            running.suppressed -= 1
        if running.suppressed or not running.active:
            return result
        if torch.compiler.is_compiling():
            if running.trace_stack:
                running.trace_stack[-1].tracker.normalized(describe(result))
            return result
        if not running.stack or in_backward():
            return result
        frame = running.stack[-1]
        try:
            with below_modes():
                given = describe(result)
            with torch._C.DisableTorchFunction():
                frame.tracker.normalized(given)
        except Exception as error:
            self._observer.fault(self._sites[frame.index], error)
        return result

    def _note(
        self, frame: ForwardFrame, index: int, route: Route, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Keep what a call was given, to be measured later."""
        site = self._sites[index]
        if site.excluded or site.child_left_alone:
            return
        site.seen += 1
        try:
            args, kwargs, tensors = without_wrapping(args, kwargs)
            if not tensors:
                return  # placeholders of something that traces
            context = Context(frame, tensors)
            read = [tensor for _, tensor in tensors]
            hidden = None if frame.hidden is None else plain(frame.hidden)
            if hidden is not None:
                read.append(hidden)
            dtype = autocast_dtype(read[0].device)

            def measure() -> None:
                described = route.describe(
                    args, kwargs, lambda batch: self._observer.sample_sequences(site, batch), dtype
                )
                observe_call(self._observer, site, route.name, context.complete(described), hidden)

            self._deferred.add(site, read, measure)
        except Exception as error:
            self._observer.fault(site, error)

    def _seen(self) -> int:
        """Grows whenever the innermost module makes a call."""
        if torch.compiler.is_compiling():
            return self._running.trace_stack[-1].left if self._running.trace_stack else 0
        if not self._running.stack:
            return 0
        site = self._sites[self._running.stack[-1].index]
        return site.seen + site.calls + site.refused.total()

    def _index_of(self, module: nn.Module | None) -> int:
        if module is not None:
            for frame in reversed(self._running.stack):
                if self._watched[frame.index][0]() is module:
                    return frame.index
        return self._running.stack[-1].index
