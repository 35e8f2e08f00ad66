"""Which watched modules are running now; what the parts of a recorder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnmon.capture.axes import Entered, unfold
from attnmon.capture.eager import EagerTracker
from attnmon.capture.torch_calls import Described


class Frame:
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


class Running:
    """What runs now.

    Attributes:
        active: between ``start`` and ``stop`` of the recorder.
        stack: forwards of watched modules, the innermost last.
        trail: the same while a graph is traced.
        suppressed: depth of functions whose inner torch calls are not calls of their own.
    """

    def __init__(self) -> None:
        self.active = False
        self.stack: list[Frame] = []
        self.trail: list[Frame] = []
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
