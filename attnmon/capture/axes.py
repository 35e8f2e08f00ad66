"""Which axis is which: heads and sequences of folded tensors, and whether a module was given a second sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmon.errors import UnsupportedAttention

# keyword arguments that carry the sequence which the keys are made of
_CONTEXTS = ("encoder_hidden_states", "key_value_states", "context", "memory", "cross_attention_states", "kv")


@dataclass(frozen=True, slots=True)
class Entered:
    """What a module's forward was given, as far as shapes tell.

    Attributes:
        shape: of the hidden states [B, L, E] or [L, B, E]; None if there are none.
        lengths: possible lengths of other sequences among the arguments.
        has_context: a keyword argument names another sequence.
    """

    shape: torch.Size | None = None
    lengths: tuple[int, ...] = ()
    has_context: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entered:
        """From the arguments of a forward."""
        first: Tensor | None = None
        lengths: list[int] = []
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Tensor) and argument.dim() == 3 and argument.is_floating_point():
                if first is None:
                    first = argument
                elif argument is not first:
                    lengths += [argument.shape[0], argument.shape[1]]
        context = [kwargs.get(name) for name in _CONTEXTS]
        has_context = any(isinstance(given, Tensor) and given is not first for given in context)
        return cls(None if first is None else first.shape, tuple(lengths), has_context and first is not None)

    def is_cross(self, queries: int, keys: int) -> bool:
        """Whether keys come from another sequence than queries; cached keys do not."""
        return self.has_context or (queries != keys and keys in self.lengths)

    def batch(self, queries: int) -> int | None:
        """The number of sequences, given the number of query positions."""
        if self.shape is None or queries not in self.shape[:2]:
            return None
        return int(self.shape[0] if self.shape[1] == queries else self.shape[1])


def count_heads(leading: tuple[int, ...], queries: int, hint: int | None, entered: Entered) -> int:
    """The number of heads of a tensor [*leading, queries, ...] that folds sequences and heads together.

    Raises:
        UnsupportedAttention: neither the module's attributes nor its input tell.
    """
    if len(leading) == 2:
        return leading[1]
    total = math.prod(leading)
    batch = entered.batch(queries)
    if batch is not None and total == batch and len(leading) == 1:
        return 1  # one head a module
    if hint is not None and (batch is None or total != batch * hint) and len(leading) > 2:
        # windows beside sequences, or groups of heads
        if leading[-1] == hint or math.prod(leading[1:]) == hint:
            return hint
    if hint is not None and total % hint == 0:
        return hint
    if hint is None and batch is not None and total % batch == 0:
        return total // batch
    raise UnsupportedAttention(f"{[*leading, queries]} by shape does not tell heads from sequences")


def with_heads(tensor: Tensor, heads: int) -> Tensor:
    """[B, H, L, X] from [B * H, L, X] or [B, groups, heads of a group, L, X]; sequences come first."""
    if tensor.dim() == 4:
        return tensor
    return tensor.flatten(0, tensor.dim() - 3).unflatten(0, (-1, heads))


def values_with_heads(values: Tensor, batch: int, heads: int) -> Tensor | None:
    """[B, Hkv, Lk, Dv] from the values of weights [batch, heads, Lq, Lk]; None if unclear."""
    if values.dim() == 4:
        return values
    if values.dim() == 2:
        return values[None, None]
    total = math.prod(values.shape[:-2])
    if total % batch or heads % (total // batch):
        return None
    if values.dim() == 3 and total == batch and heads > 1:
        return values[:, None]  # one set of values for all heads
    return values.flatten(0, values.dim() - 3).unflatten(0, (batch, total // batch))
