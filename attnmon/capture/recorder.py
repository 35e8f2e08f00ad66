"""Attaches to a model for the length of a measured step and reports each attention call with its module."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmon.calls import make_call, normalise_window
from attnmon.capture import flex, traced
from attnmon.capture import modules as names
from attnmon.capture.axes import Entered, count_heads, unfold, values_with_heads, with_heads
from attnmon.capture.coverage import CoverageRecord, Site
from attnmon.capture.eager import EagerTracker, SoftmaxSeen
from attnmon.capture.entmax import EntmaxPatch, Normalised
from attnmon.capture.flash import FlashPatch
from attnmon.capture.flex import FlexPatch
from attnmon.capture.functional import FunctionalPatch
from attnmon.capture.hooks import HookPair
from attnmon.capture.registry import RegistryPatch
from attnmon.capture.torch_calls import CallMode, Described, describe_mha, describe_sdpa
from attnmon.errors import AttnmonError, UnsupportedAttention
from attnmon.types import AttentionCall

_TRACED_SEQUENCES = 4
_TRACED_ROWS = 64  # of flex attention: evenly spaced; the sampled ones are among them


class Observer(Protocol):
    """Who is told; it computes, and keeps nothing of a call."""

    def observe(self, site: Site, call: AttentionCall) -> None:
        """Measure a call now."""

    def choose(self, site: Site, batch: int) -> slice:
        """The sequences that would be sampled of a call, for routes that have to project them first."""

    def sample(self, site: Site, call: AttentionCall) -> Any:
        """Measure a call whose values will come later: take what is needed of its logits, return a token."""

    def complete(self, site: Site, token: Any, value: Tensor | None) -> None:
        """The values of a sampled call, or None."""

    def fault(self, site: Site, error: Exception) -> None:
        """A call could not be measured."""


class Patch(Protocol):
    """Functions that no torch-level mode sees, replaced during a measured step by ones that call them and tell."""

    def install(self) -> None:
        """Replace; every reference is as before after ``remove``."""

    def remove(self) -> None:
        """Put back."""


class _Frame:
    """One module's forward on the stack."""

    __slots__ = ("entered", "heads_hint", "hidden", "index", "left", "tracker")

    def __init__(
        self, index: int, tracker: EagerTracker, hidden: Tensor | None, entered: Entered, heads_hint: int | None
    ) -> None:
        self.index, self.tracker, self.hidden, self.entered = index, tracker, hidden, entered
        self.heads_hint = heads_hint
        self.left = 0  # operators left in a traced graph

    def complete(self, described: Described) -> Described:
        """Add what the call itself does not tell: a scale that queries already have, a second sequence."""
        described = dict(described)
        queries, keys = described.pop("originals", (described["query"], described["key"]))
        entered = self.entered
        if described.pop("folded", False):
            described = unfold(described, self.heads_hint, entered)
        query, key = described["query"], described["key"]
        is_cross = described.get("is_cross", False) or entered.is_cross(query.shape[2], key.shape[2])
        return {
            **described,
            "prescale": self.tracker.factor_of(queries) * self.tracker.factor_of(keys),
            "is_cross": is_cross and not entered.is_self,
        }


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
        self._watched = _find(model, include, exclude)
        self._sites = [site for _, site in self._watched]
        self._order = {site.path: index for index, site in enumerate(self._sites)}
        # functions replaced during a measured step
        self._patches: list[Patch] = [
            FlexPatch(self),
            EntmaxPatch(self),
            FlashPatch(self, [module for module, _ in self._watched]),
            RegistryPatch(self, self._watched),
            traced.CheckpointedGraphs(),
        ]
        self._functional = FunctionalPatch(self)
        self._flex_operator: Any = None
        self._hooks: dict[int, HookPair] = {}
        self._mode = CallMode(self._report)
        self._mode_level: int | None = None  # depth of the stack at which the mode was entered; -1: by start()
        self._stack: list[_Frame] = []
        self._trail: list[_Frame] = []  # the stack while a graph is traced
        self._number = traced.register(self)
        self._known_devices: frozenset[torch.device] = frozenset()
        self._active = False
        self._thread = threading.get_ident()
        self._suppressed = 0  # depth of functions whose inner torch calls are not calls of their own
        self._was_traced = False
        self._modes_below = 0
        # who entered the mode while a graph is traced; not a number, which dynamic shapes would take for an input
        self._mode_holder: _Frame | None = None
        self._wide = True
        self._careful = False
        self._saw_nothing = False  # a measured step
        self.measured_steps = 0

    # -- what was seen --------------------------------------------------------------------------------------

    @property
    def all_sites(self) -> list[Site]:
        """Every place that is or may be watched, in the model's order; the same on every rank."""
        return self._sites

    def coverage(self) -> list[CoverageRecord]:
        """Records of the sites that are attention or were seen to make attention calls, in the model's order."""
        made_calls = [site.path for site in self._sites if site.calls]
        return [
            site.record(self.measured_steps)
            for site in self._sites
            # an attention module that only wraps another (a projection around it, say) is not a site of its own
            if site.calls
            or site.refused
            or (site.expected and not any(path.startswith(f"{site.path}.".lstrip(".")) for path in made_calls))
        ]

    def order(self, path: str) -> int:
        """Position of a module in the model, for sorting."""
        return self._order[path]

    # -- a measured step ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach; until ``stop`` every forward outside of backward is watched."""
        if self._active:
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
        self._flex_operator = flex.operator()
        self._thread = threading.get_ident()
        self._active = True
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
        if module is None or _takes_fused_path(module, site.inside_encoder):
            return False
        return self._wide or site.expected or bool(site.calls or site.refused)

    def stop(self) -> None:
        """Detach; the model is as it was."""
        self._active = False
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
            if self._active:
                hidden = _hidden_of(args, kwargs) if self._with_hidden else None
                frame = self._frame(self._trail, index, hidden, args, kwargs)
                self._trail.append(frame)
                if self._sites[index].expected and self._mode_holder is None and self._mode_level is None:
                    self._mode_holder = frame
                    self._modes_below = torch._C._len_torch_function_stack()
                    self._mode.__enter__()  # type: ignore[no-untyped-call]
            return
        # activation checkpointing runs the forward again inside backward; it was counted the first time
        if not self._active or _in_backward() or torch._C._get_tracing_state() is not None:
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
            if self._trail and not torch.compiler.is_exporting():
                if self._trail[-1] is self._mode_holder:
                    self._mode_holder = None
                    # the compiler loses the mode where it traces flex attention
                    if torch._C._len_torch_function_stack() > self._modes_below:
                        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._trail.pop().tracker.finish()
            return
        stack = self._stack
        if not stack or threading.get_ident() != self._thread or _in_backward():
            return
        for level in range(len(stack) - 1, -1, -1):
            if stack[level].index == index:
                self._unwind(level)
                return

    def _push(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = _hidden_of(args, kwargs) if self._with_hidden else None
        site = self._sites[index]
        self._stack.append(self._frame(self._stack, index, hidden, args, kwargs))
        # without gradients a mode would keep nn.MultiheadAttention from its fused path: only where it must
        # a mode around modules would meet compiled code inside them
        if site.expected or (torch.is_grad_enabled() and not self._careful):
            self._enter_mode(len(self._stack) - 1)

    def _frame(
        self, stack: list[_Frame], index: int, hidden: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Frame:
        site, entered = self._sites[index], Entered(args, kwargs)
        outer = stack[-1] if stack else None
        parent = site.path.rpartition(".")[0]
        if outer is not None and not entered.has_sequences and parent == self._sites[outer.index].path:
            entered = outer.entered  # the inner part of an attention module, given queries, keys and values
        is_traced = torch.compiler.is_compiling()
        listener = _TracedCalls(self, index, entered) if is_traced else _EagerCalls(site, self._observer, entered)
        tracker = EagerTracker(listener, None if outer is None else outer.tracker)
        return _Frame(index, tracker, hidden, entered, site.heads_hint)

    def _unwind(self, level: int) -> None:
        while len(self._stack) > level:
            frame = self._stack.pop()
            try:
                frame.tracker.finish()
            except Exception as error:
                self._observer.fault(self._sites[frame.index], error)
        if self._mode_level is not None and self._mode_level >= level and self._mode_level >= 0:
            self._leave_mode(level)

    # -- what the mode says ---------------------------------------------------------------------------------

    def _report(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._suppressed:
            return
        if torch.compiler.is_compiling():
            if func is self._flex_operator:
                self._leave_rows(args)
            elif self._trail:
                self._report_traced(func, args, kwargs, result)
            return
        if not self._stack:
            return
        frame = self._stack[-1]
        site = self._sites[frame.index]
        describe = _ADAPTERS.get(func)
        try:
            if describe is None:
                frame.tracker.saw(func, args, kwargs, result)
                return
            if site.excluded:
                return
            route, adapter = describe
            with torch.no_grad():
                described = adapter(args, kwargs, lambda batch: self._observer.choose(site, batch))
                self._observe(site, route, frame.complete(described), frame.hidden)
        except Exception as error:
            self._observer.fault(site, error)

    def _observe(self, site: Site, route: str, described: Described, hidden: Tensor | None) -> None:
        if hidden is not None and described["key"].shape[0] == hidden.shape[0]:
            described = {**described, "hidden": hidden if hidden.shape[1] == described["key"].shape[2] else None}
        call = make_call(**{**described, "is_cross": described.get("is_cross", False) or site.kind == "cross"})
        site.route = route
        if call.is_cross and not site.calls:
            site.kind = "cross"
        self._observer.observe(site, call)

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
        """Run a replaced function as it was, and measure the call that ``describe`` tells of.

        Torch calls inside the function are not reported: they are this call. The call belongs to ``module`` if it
        is watched, otherwise to the innermost watched module. If the function is not ``opaque``, torch calls inside
        are reported as anywhere else, and ``describe`` is asked only where none was seen.
        """
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)  # the compiler runs a graph that was traced before
        seen = -1 if opaque else self._seen()
        self._suppressed += opaque
        try:
            result = original(*args, **kwargs)
        finally:
            self._suppressed -= opaque
        if not opaque and self._seen() != seen:
            return result
        if torch.compiler.is_compiling():
            if self._active and self._trail and not self._suppressed:
                self._leave_call(self._trail[-1], route, args, kwargs, describe)
            return result
        if self._suppressed or not self._active or _in_backward():
            return result
        index = self._index_of(module)
        if index is None or self._sites[index].excluded:
            return result
        site = self._sites[index]
        self._suppressed += 1  # of the measurement's own torch calls
        try:
            with torch.no_grad():
                frame = self._stack[-1]
                self._observe(site, route, frame.complete(describe()), frame.hidden)
        except Exception as error:
            self._observer.fault(site, error)
        finally:
            self._suppressed -= 1
        return result

    def normalise_through(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Callable[[Any], Normalised],
    ) -> Any:
        """Run a function that stands in softmax's place, and tell the innermost module's tracker what it made."""
        self._suppressed += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._suppressed -= 1
        if self._suppressed or not self._active:
            return result
        if torch.compiler.is_compiling():
            if self._trail:
                self._trail[-1].tracker.normalised(describe(result))
            return result
        if not self._stack or _in_backward():
            return result
        frame = self._stack[-1]
        self._suppressed += 1  # of the measurement's own torch calls
        try:
            frame.tracker.normalised(describe(result))
        except Exception as error:
            self._observer.fault(self._sites[frame.index], error)
        finally:
            self._suppressed -= 1
        return result

    def choose(self, batch: int) -> slice:
        """The sequences to project of a call that is being described."""
        if torch.compiler.is_compiling() or not self._stack:
            return _first_sequences(batch)
        return self._observer.choose(self._sites[self._stack[-1].index], batch)

    def _seen(self) -> int:
        """Grows whenever the innermost module makes a call."""
        if torch.compiler.is_compiling():
            return self._trail[-1].left if self._trail else 0
        if not self._stack:
            return 0
        site = self._sites[self._stack[-1].index]
        return site.calls + site.refused.total()

    def _leave_call(
        self,
        frame: _Frame,
        route: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Callable[[], Described],
    ) -> None:
        """The operator for a replaced function, or for why its call is not measured."""
        if self._sites[frame.index].excluded:
            return
        try:
            described = frame.complete(describe())
        except UnsupportedAttention as error:
            tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
            self.leave_refusal(frame.index, error.args[0], tensors[0].device)
            return
        self._leave_operator(frame.index, route, described)

    def _index_of(self, module: nn.Module | None) -> int | None:
        if module is not None:
            for frame in reversed(self._stack):
                if self._watched[frame.index][0]() is module:
                    return frame.index
        return self._stack[-1].index if self._stack else None

    # -- compiled graphs ------------------------------------------------------------------------------------

    def _report_traced(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Runs while a graph is traced: leaves an operator in it."""
        frame = self._trail[-1]
        index = frame.index
        describe = _ADAPTERS.get(func)
        if describe is None:
            frame.tracker.saw(func, args, kwargs, result)
            return
        if self._sites[index].excluded:
            return
        route, adapter = describe
        described = adapter(args, kwargs, _first_sequences)
        key = described["key"]
        if frame.hidden is not None and frame.hidden.shape[:2] == (key.shape[0], key.shape[2]):
            described["hidden"] = frame.hidden.detach()
        self._leave_operator(index, route, frame.complete(described))

    def _leave_operator(self, index: int, route: str, described: Described) -> None:
        query, key, value = described["query"], described["key"], described.get("value")
        mask, sinks = described.get("attn_mask"), described.get("sinks")
        left, right = normalise_window(described.get("window")) or (None, None)
        self._trail[-1].left += 1
        torch.ops.attnmon.observe(
            traced.ORDER[query.device],
            self._number,
            index,
            route,
            query.detach(),
            key.detach(),
            None if value is None else value.detach(),
            None if mask is None else mask.detach(),
            described.get("key_padding_mask"),
            None if sinks is None else sinks.detach(),
            described.get("cu_seqlens"),
            described.get("hidden"),
            described.get("scale"),
            described.get("softcap"),
            left,
            right,
            described.get("causal_offset", 0),
            described.get("is_causal", False),
            described.get("is_cross", False),
            described.get("prescale", 1.0),
        )

    def _leave_rows(self, args: tuple[Any, ...]) -> None:
        """The operator for flex attention; also in functions that were compiled without their module."""
        index = self._trail[-1].index if self._trail else -1
        if index >= 0 and self._sites[index].excluded:
            return
        rows = flex.rows_in_graph(args, _TRACED_SEQUENCES, _TRACED_ROWS)
        order, head_dim = traced.ORDER[args[0].device], args[0].shape[3]
        if self._trail:
            self._trail[-1].left += 1
        torch.ops.attnmon.observe_rows(order, self._number, index, flex.ROUTE, *rows, head_dim)

    def leave_logits(self, index: int, seen: SoftmaxSeen, heads: int, is_cross: bool, values: Tensor | None) -> None:
        """While a graph is traced: the operator for eager attention."""
        if self._sites[index].excluded:
            return
        if self._trail:
            self._trail[-1].left += 1
        torch.ops.attnmon.observe_logits(
            traced.ORDER[seen.logits.device],
            self._number,
            index,
            seen.logits.detach(),
            None if values is None else values.detach(),
            None if seen.sinks is None else seen.sinks.detach(),
            seen.scale,
            seen.head_dim,
            heads,
            is_cross,
        )

    def leave_refusal(self, index: int, reason: str, device: torch.device) -> None:
        """While a graph is traced: the operator for a call that is not measured."""
        if self._sites[index].expected and not self._sites[index].excluded:
            if self._trail:
                self._trail[-1].left += 1
            torch.ops.attnmon.refuse(traced.ORDER[device], self._number, index, reason)

    def replay(self, index: int, route: str, described: Described) -> None:
        """A compiled graph makes a call that was noted while it was traced."""
        if not self._active or _in_backward():
            return
        site = self._sites[index]
        try:
            with torch.no_grad():
                self._observe(site, route, described, None)
        except Exception as error:
            self._observer.fault(site, error)

    def replay_logits(self, index: int, seen: SoftmaxSeen, heads: int, is_cross: bool, value: Tensor | None) -> None:
        """The same for eager attention."""
        if not self._active or _in_backward():
            return
        calls = _EagerCalls(self._sites[index], self._observer, Entered())
        token = calls.sample(seen, heads, is_cross)
        if token is not None:
            calls.values(token, value, used=True)

    def replay_rows(
        self, index: int, route: str, logits: Tensor, positions: Tensor, value: Tensor, scale: float, head_dim: int
    ) -> None:
        """The same for flex attention; index -1 is the innermost module that runs now."""
        if not self._active or _in_backward() or (index < 0 and not self._stack):
            return
        site, observer = self._sites[index if index >= 0 else self._stack[-1].index], self._observer
        if site.excluded:
            return
        try:
            call = AttentionCall(
                query=None, key=None, value=None, scale=scale, head_dim=head_dim, logits=logits, positions=positions
            )
            observer.complete(site, observer.sample(site, call), value)
            site.route = route
        except Exception as error:
            observer.fault(site, error)

    def replay_refusal(self, index: int, reason: str) -> None:
        """The same for a call that is not measured."""
        if self._active and not _in_backward():
            self._observer.fault(self._sites[index], UnsupportedAttention(reason))


class _EagerCalls:
    """What an eager tracker tells of a module's softmax."""

    def __init__(self, site: Site, observer: Observer, entered: Entered) -> None:
        self._site, self._observer, self._entered = site, observer, entered
        self._route = ""

    def softmax(self, seen: SoftmaxSeen) -> Any:
        """Sample it; of a module that does not look like attention, tell of a fault only if values follow."""
        *leading, queries, keys = seen.logits.shape
        try:
            heads = count_heads(tuple(leading), queries, self._site.heads_hint, self._entered)
        except UnsupportedAttention as error:
            return error
        return self.sample(seen, heads, self._entered.is_cross(queries, keys))

    def sample(self, seen: SoftmaxSeen, heads: int, is_cross: bool) -> Any:
        """Take the sampled rows; None if there is nothing to wait for."""
        if self._site.excluded:
            return None
        try:
            call = AttentionCall(
                query=None,
                key=None,
                value=None,
                scale=seen.scale,
                head_dim=seen.head_dim,
                logits=with_heads(seen.logits.detach(), heads),
                sinks=None if seen.sinks is None else seen.sinks.detach(),
                is_cross=is_cross or self._site.kind == "cross",
            )
            self._route, made = "eager", seen.normalised
            if made is not None:
                self._route, weights = made.name, with_heads(made.weights.detach(), heads)
                call = replace(call, weights=weights, normaliser=made.function, alpha=made.alpha)
            return (self._observer.sample(self._site, call), call.num_sequences, heads, call.is_cross)
        except Exception as error:
            return error

    def values(self, token: Any, values: Tensor | None, *, used: bool) -> None:
        if not used and not self._site.expected:
            return  # a softmax whose result weighs nothing: a classifier's, a router's
        try:
            if isinstance(token, Exception):
                raise token
            sampled, batch, heads, is_cross = token
            value = None if values is None else values_with_heads(values, batch, heads)
            if is_cross and not self._site.calls:
                self._site.kind = "cross"
            self._observer.complete(self._site, sampled, value)
            self._site.route = self._route
        except Exception as error:
            self._observer.fault(self._site, error)

    def refused(self, reason: str, tensor: Tensor) -> None:
        if self._site.expected and not self._site.excluded:
            self._observer.fault(self._site, UnsupportedAttention(reason))


class _TracedCalls:
    """The same while a graph is traced; the logits stay in the graph until the values are known."""

    def __init__(self, recorder: Recorder, index: int, entered: Entered) -> None:
        self._recorder, self._index, self._entered = recorder, index, entered

    def softmax(self, seen: SoftmaxSeen) -> Any:
        return seen

    def values(self, token: Any, values: Tensor | None, *, used: bool) -> None:
        recorder, entered = self._recorder, self._entered
        site = recorder.all_sites[self._index]
        if not used and not site.expected:
            return
        *leading, queries, keys = token.logits.shape
        try:
            heads = count_heads(tuple(leading), queries, site.heads_hint, entered)
        except UnsupportedAttention as error:
            recorder.leave_refusal(self._index, str(error), token.logits.device)
            return
        recorder.leave_logits(self._index, token, heads, entered.is_cross(queries, keys), values)

    def refused(self, reason: str, tensor: Tensor) -> None:
        self._recorder.leave_refusal(self._index, reason, tensor.device)


def _first_sequences(batch: int) -> slice:
    """In a compiled graph the sampled sequences cannot move; a few at the front are enough to project."""
    return slice(0, _TRACED_SEQUENCES)


_Adapter = Callable[[tuple[Any, ...], Mapping[str, Any], Callable[[int], slice]], Described]
_ADAPTERS: dict[Any, tuple[str, _Adapter]] = {
    F.scaled_dot_product_attention: ("sdpa", lambda args, kwargs, choose: describe_sdpa(args, kwargs)),
    F.multi_head_attention_forward: ("multi_head_attention_forward", describe_mha),
}


def _find(
    model: nn.Module, include: Sequence[str] | str | None, exclude: Sequence[str] | str | None
) -> list[tuple[weakref.ref[nn.Module], Site]]:
    if not isinstance(model, nn.Module):
        raise AttnmonError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    found = list(names.walk(model))
    attention = [path for path, module in found if names.looks_like_attention(module)]
    paths = attention or [path for path, module in found if names.mentions_attention(module)]
    if not paths:
        raise AttnmonError(
            f"found no attention in {type(model).__name__}: no module whose class name says attention and no forward "
            "that calls an attention function or a softmax; pass the module that holds the transformer"
        )
    include = names.check_patterns("include", include, [path for path, _ in found])
    exclude = names.check_patterns("exclude", exclude, [path for path, _ in found])
    if not any(names.selected(path, include, exclude) for path in paths):
        raise AttnmonError("include and exclude leave no attention module; there are: " + ", ".join(paths[:8]))
    watched = []
    encoders: list[str] = []
    for path, module in found:
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            encoders.append(path)
        expected = names.looks_like_attention(module)
        if expected or names.may_call(module):
            site = Site(path, names.kind_of(path, module), expected, heads_hint=names.head_count(module))
            site.excluded = not names.selected(path, include, exclude)
            site.inside_encoder = any(path == encoder or path.startswith(f"{encoder}.") for encoder in encoders)
            watched.append((weakref.ref(module), site))
    return watched


def _takes_fused_path(module: nn.Module, inside_encoder: bool) -> bool:
    """In evaluation without gradients nn.Transformer layers run one fused kernel, which a hook would switch off."""
    if torch.is_grad_enabled() or module.training:
        return False
    return inside_encoder or isinstance(module, nn.MultiheadAttention)


def _hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states [B, L, E] that enter a module."""
    for candidate in (*args[:1], kwargs.get("hidden_states"), kwargs.get("x"), kwargs.get("query")):
        if isinstance(candidate, Tensor) and candidate.dim() == 3 and candidate.is_floating_point():
            return candidate
    return None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
