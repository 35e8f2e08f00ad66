"""Which axis is which: heads and sequences of folded tensors, and whether a module was given a second sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnmon.errors import UnsupportedAttention

# keyword arguments that carry the sequence which the keys are made of
_CONTEXTS = ("encoder_hidden_states", "key_value_states", "context", "memory", "cross_attention_states", "kv")


class ModuleInputs:
    """What a module's forward was given, as far as shapes tell; nothing is looked at before it is asked for.

    (A compiler may run a hook as a graph of its own, which has to stay empty.)
    """

    __slots__ = ("_args", "_known", "_kwargs")

    def __init__(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self._args, self._kwargs = args, kwargs or {}
        self._known: _Looked | None = None

    def _look(self) -> _Looked:
        if self._known is not None:
            return self._known
        args, kwargs = self._args, self._kwargs
        # arguments that may be hidden states [B, L, E] or [L, B, E]
        sequences = [
            argument
            for argument in (*args, *kwargs.values())
            if isinstance(argument, Tensor) and argument.dim() == 3 and argument.is_floating_point()
        ]
        first = sequences[0] if sequences else None
        query = kwargs.get("query", args[0] if args else None)
        key = kwargs.get("key", args[1] if len(args) > 1 else None)
        contexts = [kwargs.get(name) for name in _CONTEXTS]
        return _Looked(
            [sequence.shape for sequence in sequences],
            [sequence.shape for sequence in sequences[1:] if sequence is not first],
            first is not None and any(isinstance(given, Tensor) and given is not first for given in contexts),
            query is key and query is not None,
        )

    def settle(self) -> ModuleInputs:
        """Look now, and let go of the tensors."""
        if self._known is None:
            self._known = self._look()
            self._args, self._kwargs = (), {}
        return self

    @property
    def has_sequences(self) -> bool:
        return bool(self._look().shapes)

    @property
    def shape(self) -> torch.Size | None:
        """Of the first hidden states."""
        found = self._look().shapes
        return found[0] if found else None

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are one tensor (values may be another: positions added to the first two)."""
        return self._look().is_self

    def is_cross(self, queries: int, keys: int) -> bool:
        """Whether keys come from another sequence than queries; cached keys do not."""
        looked = self._look()
        if not looked.shapes:
            return False
        return looked.has_context or (queries != keys and any(keys in other[:2] for other in looked.others))

    def batch(self, queries: int) -> int | None:
        """The number of sequences, given the number of query positions."""
        shape = self.shape
        if shape is None or queries not in shape[:2]:
            return None
        return int(shape[0] if shape[1] == queries else shape[1])


class _Looked:
    """Shapes of the hidden states that a module was given."""

    __slots__ = ("has_context", "is_self", "others", "shapes")

    def __init__(self, shapes: list[torch.Size], others: list[torch.Size], has_context: bool, is_self: bool) -> None:
        self.shapes = shapes
        self.others = others  # of those that are not the first
        self.has_context = has_context  # a keyword says that keys come from elsewhere
        self.is_self = is_self


def count_heads(leading: tuple[int, ...], queries: int, hint: int | None, inputs: ModuleInputs) -> int:
    """The number of heads of a tensor [*leading, queries, ...] that folds sequences and heads together.

    Raises:
        UnsupportedAttention: neither the module's attributes nor its input tell.
    """
    if len(leading) == 2:
        return leading[1]
    total = math.prod(leading)
    batch = inputs.batch(queries)
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
    unfolded: Tensor = tensor.flatten(0, tensor.dim() - 3).unflatten(0, (-1, heads))
    return unfolded


def unfold(described: dict[str, Any], hint: int | None, inputs: ModuleInputs) -> dict[str, Any]:
    """A call given as [N, 1, L, D] with the heads that are in N on their own axis.

    Raises:
        UnsupportedAttention: neither the module's attributes nor its input tell.
    """
    sequences, _, queries, _ = described["query"].shape
    heads = count_heads((sequences,), queries, hint, inputs)
    mask = described.get("attn_mask")
    if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
        mask = with_heads(mask[:, 0], heads)
    tensors = {name: with_heads(described[name][:, 0], heads) for name in ("query", "key", "value")}
    return {**described, **tensors, "attn_mask": mask}


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
    return with_heads(values, total // batch)
