"""Which watched modules are running now; what the parts of a recorder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnmon.call import CallArgs
from attnmon.capture.hooks import BeforeForward
from attnmon.capture.routes.eager_tracker import EagerTracker
from attnmon.capture.routes.head_axes import ModuleInputs, unfold


class ForwardFrame:
    """One module's forward on the stack."""

    __slots__ = ("heads_hint", "hidden", "hook", "inputs", "inside", "left", "tracker")

    def __init__(
        self,
        hook: BeforeForward,
        tracker: EagerTracker,
        hidden: Tensor | None,
        inputs: ModuleInputs,
        heads_hint: int | None,
    ) -> None:
        self.hook, self.tracker, self.hidden, self.inputs = hook, tracker, hidden, inputs
        self.heads_hint = heads_hint
        self.left = 0  # operators left in a traced graph
        self.inside = 0  # of so many modules of a compiled graph, for a frame of eager code

    @property
    def index(self) -> int:
        """Of the module's site."""
        return self.hook.index

    def complete(self, described: CallArgs) -> CallArgs:
        """Add what the call itself does not tell: a scale that queries already have, a second sequence."""
        factor_of = self.tracker.factor_of
        return complete(described, self.inputs, self.heads_hint, factor_of)


class Context:
    """What was known of a call when it was made, without any tensor of its module's input.

    Args:
        frame: of the module that makes it.
        originals: the tensors of the call as the module has them, and as they are without what ``torch.func`` wraps.
    """

    __slots__ = ("_factors", "heads_hint", "hidden", "inputs")

    def __init__(self, frame: ForwardFrame, originals: list[tuple[Tensor, Tensor]]) -> None:
        self.inputs, self.heads_hint, self.hidden = frame.inputs.settle(), frame.heads_hint, frame.hidden
        self._factors: dict[int, float] = {}
        for original, plain in originals:
            factor = frame.tracker.factor_of(original)
            if factor != 1.0:
                self._factors[id(plain)] = factor

    def complete(self, described: CallArgs) -> CallArgs:
        """See ``ForwardFrame.complete``."""
        return complete(described, self.inputs, self.heads_hint, lambda tensor: self._factors.get(id(tensor), 1.0))


def complete(described: CallArgs, inputs: ModuleInputs, heads_hint: int | None, factor_of: Any) -> CallArgs:
    """Add to what a call tells: how its queries and keys were scaled before, which axis is heads, cross or self."""
    described = dict(described)
    queries, keys = described.pop("originals", (described["query"], described["key"]))
    if described.pop("folded", False):
        described = unfold(described, heads_hint, inputs)
    query, key = described["query"], described["key"]
    is_cross = described.get("is_cross", False) or inputs.is_cross(query.shape[2], key.shape[2])
    return {
        **described,
        "prescale": factor_of(queries) * factor_of(keys),
        "is_cross": is_cross and not inputs.is_self,
    }


class ActiveForwards:
    """What runs now.

    Attributes:
        active: between ``start`` and ``stop`` of the recorder.
        stack: forwards of watched modules, the innermost last.
        trace_stack: the same while a graph is traced.
        withheld: indices of sites whose hooks are away while a layer of torch chooses its path.
        suppressed: depth of functions whose inner torch calls are not calls of their own.
    """

    def __init__(self) -> None:
        self.active = False
        self.stack: list[ForwardFrame] = []
        self.trace_stack: list[ForwardFrame] = []
        self.withheld: list[int] = []
        self.suppressed = 0


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states [B, L, E] that enter a module."""
    for candidate in (*args[:1], kwargs.get("hidden_states"), kwargs.get("x"), kwargs.get("query")):
        if isinstance(candidate, Tensor) and candidate.dim() == 3 and candidate.is_floating_point():
            return candidate
    return None


def in_backward() -> bool:
    """Whether autograd is running, which a forward inside of it repeats (activation checkpointing)."""
    return bool(torch._C._current_graph_task_id() != -1)
