"""Attention calls as they are made: those that the function mode sees, and those of replaced functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnmon.calls import make_call
from attnmon.capture.coverage import Site
from attnmon.capture.protocols import Observer
from attnmon.capture.running import Running, in_backward
from attnmon.capture.sites import Watched
from attnmon.capture.torch_calls import ADAPTERS, Described
from attnmon.capture.traced_calls import TracedCalls, first_sequences

if TYPE_CHECKING:
    from attnmon.capture.entmax import Normalised


class Reporter:
    """Measures the calls of what is running, or leaves operators for them in a graph that is being traced.

    Args:
        watched: the watched modules with their sites, by index.
        observer: told of each call.
        running: what runs now.
        traced_calls: for graphs.
    """

    def __init__(
        self, watched: Sequence[Watched], observer: Observer, running: Running, traced_calls: TracedCalls
    ) -> None:
        self._watched, self._observer, self._running, self._traced = watched, observer, running, traced_calls
        self._sites = [site for _, site in watched]
        self.flex_operator: Any = None  # the higher-order operator, as graphs call it

    def report(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch call was made under the mode."""
        running = self._running
        if running.suppressed:
            return
        if torch.compiler.is_compiling():
            if func is self.flex_operator:
                self._traced.rows(args)
            elif running.trail:
                self._traced.report(func, args, kwargs, result)
            return
        if not running.stack:
            return
        frame = running.stack[-1]
        site = self._sites[frame.index]
        describe = ADAPTERS.get(func)
        try:
            if describe is None:
                frame.tracker.saw(func, args, kwargs, result)
                return
            if site.excluded:
                return
            route, adapter = describe
            with torch.no_grad():
                described = adapter(args, kwargs, lambda batch: self._observer.choose(site, batch))
                observe_described(self._observer, site, route, frame.complete(described), frame.hidden)
        except Exception as error:
            self._observer.fault(site, error)

    def call_through(
        self,
        route: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Callable[[], Described],
        module: nn.Module | None = None,
        *,
        opaque: bool = True,
    ) -> Any:
        """See ``attnmon.capture.protocols.Caller``."""
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
            if running.active and running.trail and not running.suppressed:
                self._traced.replaced(running.trail[-1], route, args, kwargs, describe)
            return result
        if running.suppressed or not running.active or in_backward():
            return result
        index = self._index_of(module)
        if index is None or self._sites[index].excluded:
            return result
        site = self._sites[index]
        running.suppressed += 1  # of the measurement's own torch calls
        try:
            with torch.no_grad():
                frame = running.stack[-1]
                observe_described(self._observer, site, route, frame.complete(describe()), frame.hidden)
        except Exception as error:
            self._observer.fault(site, error)
        finally:
            running.suppressed -= 1
        return result

    def normalise_through(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Callable[[Any], Normalised],
    ) -> Any:
        """See ``attnmon.capture.protocols.Caller``."""
        running = self._running
        running.suppressed += 1
        try:
            result = original(*args, **kwargs)
        finally:
            running.suppressed -= 1
        if running.suppressed or not running.active:
            return result
        if torch.compiler.is_compiling():
            if running.trail:
                running.trail[-1].tracker.normalised(describe(result))
            return result
        if not running.stack or in_backward():
            return result
        frame = running.stack[-1]
        running.suppressed += 1  # of the measurement's own torch calls
        try:
            frame.tracker.normalised(describe(result))
        except Exception as error:
            self._observer.fault(self._sites[frame.index], error)
        finally:
            running.suppressed -= 1
        return result

    def choose(self, batch: int) -> slice:
        """See ``attnmon.capture.protocols.Caller``."""
        if torch.compiler.is_compiling() or not self._running.stack:
            return first_sequences(batch)
        return self._observer.choose(self._sites[self._running.stack[-1].index], batch)

    def _seen(self) -> int:
        """Grows whenever the innermost module makes a call."""
        if torch.compiler.is_compiling():
            return self._running.trail[-1].left if self._running.trail else 0
        if not self._running.stack:
            return 0
        site = self._sites[self._running.stack[-1].index]
        return site.calls + site.refused.total()

    def _index_of(self, module: nn.Module | None) -> int | None:
        if module is not None:
            for frame in reversed(self._running.stack):
                if self._watched[frame.index][0]() is module:
                    return frame.index
        return self._running.stack[-1].index if self._running.stack else None


def observe_described(observer: Observer, site: Site, route: str, described: Described, hidden: Tensor | None) -> None:
    """Have a call measured.

    Args:
        described: arguments of ``attnmon.calls.make_call``.
        hidden: the hidden states [B, L, E] that entered its module, if they are wanted.
    """
    if hidden is not None and described["key"].shape[0] == hidden.shape[0]:
        described = {**described, "hidden": hidden if hidden.shape[1] == described["key"].shape[2] else None}
    call = make_call(**{**described, "is_cross": described.get("is_cross", False) or site.kind == "cross"})
    site.route = route
    if call.is_cross and not site.calls:
        site.kind = "cross"
    observer.observe(site, call)
