"""What is left in a graph while it is traced: operators that tell of its calls whenever it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnmon.calls import normalise_window
from attnmon.capture import flex, traced
from attnmon.capture.axes import Entered, count_heads
from attnmon.capture.coverage import Site
from attnmon.capture.eager import SoftmaxSeen
from attnmon.capture.running import Frame, Running
from attnmon.capture.torch_calls import ADAPTERS, Described
from attnmon.errors import UnsupportedAttention

_SEQUENCES = 4
_ROWS = 64  # of flex attention: evenly spaced; the sampled ones are among them


class TracedCalls:
    """Leaves the operators of ``attnmon.capture.traced``.

    Args:
        number: by which the operators find who replays them.
        sites: by index.
        running: whose ``trail`` says which module is being traced.
    """

    def __init__(self, number: int, sites: Sequence[Site], running: Running) -> None:
        self._number, self._sites, self._running = number, sites, running

    def report(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch call of the innermost module."""
        frame = self._running.trail[-1]
        index = frame.index
        describe = ADAPTERS.get(func)
        if describe is None:
            frame.tracker.saw(func, args, kwargs, result)
            return
        if self._sites[index].excluded:
            return
        route, adapter = describe
        described = adapter(args, kwargs, first_sequences)
        key = described["key"]
        if frame.hidden is not None and frame.hidden.shape[:2] == (key.shape[0], key.shape[2]):
            described["hidden"] = frame.hidden.detach()
        self._call(index, route, frame.complete(described))

    def replaced(
        self,
        frame: Frame,
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
            self.refusal(frame.index, error.args[0], tensors[0].device)
            return
        self._call(frame.index, route, described)

    def _call(self, index: int, route: str, described: Described) -> None:
        query, key, value = described["query"], described["key"], described.get("value")
        mask, sinks = described.get("attn_mask"), described.get("sinks")
        left, right = normalise_window(described.get("window")) or (None, None)
        self._running.trail[-1].left += 1
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

    def rows(self, args: tuple[Any, ...]) -> None:
        """The operator for flex attention; also in functions that were compiled without their module."""
        trail = self._running.trail
        index = trail[-1].index if trail else -1
        if index >= 0 and self._sites[index].excluded:
            return
        rows = flex.rows_in_graph(args, _SEQUENCES, _ROWS)
        order, head_dim = traced.ORDER[args[0].device], args[0].shape[3]
        self._count()
        torch.ops.attnmon.observe_rows(order, self._number, index, flex.ROUTE, *rows, head_dim)

    def logits(self, index: int, seen: SoftmaxSeen, heads: int, is_cross: bool, values: Tensor | None) -> None:
        """The operator for eager attention."""
        if self._sites[index].excluded:
            return
        self._count()
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

    def refusal(self, index: int, reason: str, device: torch.device) -> None:
        """The operator for a call that is not measured."""
        if self._sites[index].expected and not self._sites[index].excluded:
            self._count()
            torch.ops.attnmon.refuse(traced.ORDER[device], self._number, index, reason)

    def _count(self) -> None:
        if self._running.trail:
            self._running.trail[-1].left += 1


class TracedSoftmax:
    """What an eager tracker tells while a graph is traced; the logits stay in it until the values are known."""

    def __init__(self, calls: TracedCalls, site: Site, index: int, entered: Entered) -> None:
        self._calls, self._site, self._index, self._entered = calls, site, index, entered

    def softmax(self, seen: SoftmaxSeen) -> Any:
        return seen

    def values(self, token: Any, values: Tensor | None, *, used: bool) -> None:
        if not used and not self._site.expected:
            return
        *leading, queries, keys = token.logits.shape
        try:
            heads = count_heads(tuple(leading), queries, self._site.heads_hint, self._entered)
        except UnsupportedAttention as error:
            self._calls.refusal(self._index, str(error), token.logits.device)
            return
        self._calls.logits(self._index, token, heads, self._entered.is_cross(queries, keys), values)

    def refused(self, reason: str, tensor: Tensor) -> None:
        self._calls.refusal(self._index, reason, tensor.device)


def first_sequences(batch: int) -> slice:
    """In a compiled graph the sampled sequences cannot move; a few at the front are enough to project."""
    return slice(0, _SEQUENCES)
