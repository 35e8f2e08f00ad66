"""Attaches to a model for the length of a measured step and reports each attention call with its module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnmon.capture import modules as names
from attnmon.capture.coverage import CoverageRecord, Site
from attnmon.capture.eager import EagerTracker, SoftmaxSeen
from attnmon.capture.torch_calls import CallMode, four_axes, is_sdpa, sdpa_call
from attnmon.errors import AttnmonError
from attnmon.types import AttentionCall


class Observer(Protocol):
    """Who is told; upstream of everything that computes."""

    def observe(self, site: Site, call: AttentionCall) -> None:
        """Measure a call now; nothing of it may be kept."""

    def sample(self, site: Site, call: AttentionCall) -> Any:
        """Measure a call whose values will come later: take what is needed of its logits, return a token."""

    def complete(self, site: Site, token: Any, value: Tensor | None) -> None:
        """The values of a sampled call, or None."""

    def fault(self, site: Site, error: Exception) -> None:
        """A call could not be measured."""


@dataclass(slots=True)
class _Frame:
    site: Site
    tracker: EagerTracker


class Recorder:
    """Watches the attention modules of a model between ``start`` and ``stop``; outside, the model is untouched.

    Args:
        model: any module, wrapped or not.
        observer: told of each call.
        include, exclude: glob patterns on canonical paths.

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
    ) -> None:
        if not isinstance(model, nn.Module):
            raise AttnmonError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        self._observer = observer
        found = list(names.walk(model))
        attention = [path for path, module in found if names.looks_like_attention(module)]
        mentions = [path for path, module in found if names.mentions_attention(module)]
        if not attention and not mentions:
            raise AttnmonError(
                f"found no attention in {type(model).__name__}: no module whose class name says attention and no forward "
                "that calls an attention function or a softmax; pass the module that holds the transformer"
            )
        paths = attention or mentions
        include_patterns = names.check_patterns("include", include, [path for path, _ in found])
        exclude_patterns = names.check_patterns("exclude", exclude, [path for path, _ in found])
        if not any(names.selected(path, include_patterns, exclude_patterns) for path in paths):
            raise AttnmonError("include and exclude leave no attention module; there are: " + ", ".join(paths[:8]))
        self._watched: list[tuple[weakref.ref[nn.Module], Site]] = []
        for path, module in found:
            expected = names.looks_like_attention(module)
            if expected or names.may_call(module):
                site = Site(path, names.kind_of(path, module), expected)
                site.excluded = not names.selected(path, include_patterns, exclude_patterns)
                self._watched.append((weakref.ref(module), site))
        self._order = {site.path: index for index, (_, site) in enumerate(self._watched)}
        self._handles: list[Any] = []
        self._stack: list[_Frame] = []
        self._mode = CallMode(self._report)
        self._in_mode = False
        self._narrowed = False
        self.measured_steps = 0

    @property
    def sites(self) -> list[Site]:
        """Sites that are attention or were seen to make attention calls, in the model's order."""
        listed = [site for _, site in self._watched if site.expected or site.calls or site.refused]
        made_calls = [site.path for site in listed if site.calls]
        # an attention module that only wraps another (a projection around it, say) is not a site of its own
        return [
            site
            for site in listed
            if site.calls
            or site.refused
            or not any(path.startswith(site.path + ".") or site.path == "" for path in made_calls)
        ]

    @property
    def all_sites(self) -> list[Site]:
        """Every place that is or may be watched, in the model's order; the same on every rank."""
        return [site for _, site in self._watched]

    def coverage(self) -> list[CoverageRecord]:
        return [site.record(self.measured_steps) for site in self.sites]

    def order(self, path: str) -> int:
        """Position of a module in the model, for sorting."""
        return self._order[path]

    # -- a measured step ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach hooks; until ``stop`` every forward outside of backward is watched."""
        self.stop()
        for reference, site in self._watched:
            module = reference()
            if module is None or (self._narrowed and not (site.expected or site.calls or site.refused)):
                continue
            before, after = self._hooks(site)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def stop(self) -> None:
        """Detach; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unwind(0)

    def end_step(self, micro_batches_seen: bool) -> None:
        """A measured step is over: from now on only modules that made calls, or look like it, are hooked."""
        if micro_batches_seen:
            self.measured_steps += 1
            self._narrowed = True

    def _hooks(self, site: Site) -> tuple[Callable[..., None], Callable[..., None]]:
        depth: list[int] = []

        def before(module: nn.Module, args: Any) -> None:
            if _in_backward():  # activation checkpointing runs the forward again; it was counted the first time
                depth.append(-1)
                return
            depth.append(len(self._stack))
            self._enter(site)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if depth:
                level = depth.pop()
                if level >= 0:
                    self._unwind(level)

        return before, after

    def _enter(self, site: Site) -> None:
        observer = self._observer

        def on_softmax(seen: SoftmaxSeen) -> Any:
            if site.excluded:
                return None
            try:
                return observer.sample(site, _logits_call(seen))
            except Exception as error:
                observer.fault(site, error)
                return None

        def on_values(token: Any, values: Tensor | None) -> None:
            try:
                observer.complete(site, token, None if values is None else four_axes(values))
            except Exception as error:
                observer.fault(site, error)

        def on_refused(reason: str) -> None:
            if not site.excluded and site.expected:
                observer.fault(site, AttnmonError(reason))

        self._stack.append(_Frame(site, EagerTracker(on_softmax, on_values, on_refused)))
        if not self._in_mode:
            self._mode.__enter__()
            self._in_mode = True

    def _unwind(self, level: int) -> None:
        while len(self._stack) > level:
            self._stack.pop().tracker.finish()
        if self._in_mode and not self._stack:
            self._in_mode = False
            self._mode.__exit__(None, None, None)

    def _report(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self._stack:
            return
        frame = self._stack[-1]
        site = frame.site
        if is_sdpa(func):
            if site.excluded:
                return
            try:
                self._observer.observe(replace_route(site, "sdpa"), sdpa_call(args, kwargs))
            except Exception as error:
                self._observer.fault(site, error)
            return
        frame.tracker.saw(func, args, kwargs, result)


def replace_route(site: Site, route: str) -> Site:
    """Note by which route the site's calls are seen."""
    site.route = route
    return site


def _logits_call(seen: SoftmaxSeen) -> AttentionCall:
    logits = seen.logits.detach()
    if logits.dim() > 4:  # [B, groups, heads of a group, Lq, Lk]
        logits = logits.flatten(1, logits.dim() - 3)
    return AttentionCall(
        query=None, key=None, value=None, scale=seen.scale, head_dim=seen.head_dim, logits=logits
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


