"""Attention spelled out: a product of queries and keys, a softmax over keys, a product with the values.

The softmax's input is, to the last bit, what the definitions call logits: scale, softcap, bias and masks are in
it. What it does not tell is the scale, which the tracker follows through the arithmetic from product to softmax
(and on queries and keys that were scaled beforehand), and the values, which appear in the product afterwards.
Tensors are told apart by identity; of the tensors of L x L none is kept beyond the operation that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PRODUCTS: frozenset[Any] = frozenset(
    {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, torch.baddbmm, Tensor.baddbmm, torch.einsum}
)
_MULTIPLY: frozenset[Any] = frozenset(
    {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
)
_DIVIDE: frozenset[Any] = frozenset(
    {torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.div_, Tensor.divide}
    | {Tensor.__truediv__, Tensor.__itruediv__, Tensor.true_divide}
)
_SOFTMAX: frozenset[Any] = frozenset({torch.softmax, F.softmax, Tensor.softmax, torch.nn.functional.softmax})
_NORMALISE: frozenset[Any] = frozenset({F.layer_norm, F.rms_norm, F.normalize, F.group_norm, torch.layer_norm})

HANDLED = _PRODUCTS | _MULTIPLY | _DIVIDE | _SOFTMAX
_MAX_SCALED = 8  # scaled tensors remembered per module call; queries and keys are among the last few


@dataclass(slots=True)
class _Scores:
    tensor: Tensor
    factor: float | None  # None: multiplied by something whose value is not known without waiting for it
    head_dim: int


@dataclass(slots=True)
class SoftmaxSeen:
    """A softmax over keys: its input and what is known of it."""

    logits: Tensor
    scale: float
    head_dim: int


class SoftmaxListener(Protocol):
    """Who is told of a module's softmax."""

    def softmax(self, seen: SoftmaxSeen) -> Any:
        """Its input, before anything else happens to it; the answer is handed back with the values."""

    def values(self, token: Any, values: Tensor | None) -> None:
        """The values, or None if the module ended without a product."""

    def refused(self, reason: str, tensor: Tensor) -> None:
        """A softmax that cannot be measured, and some tensor of it."""


class EagerTracker:
    """Follows one module's arithmetic; told of every torch call the module makes, after it was made."""

    def __init__(self, listener: SoftmaxListener) -> None:
        self._listener = listener
        self._scores: _Scores | None = None
        self._scaled: list[tuple[Tensor, float]] = []
        self._probs: Tensor | None = None
        self._token: Any = None

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at one torch call and its result."""
        if not isinstance(result, Tensor):
            return
        if func in _PRODUCTS:
            self._product(func, args, kwargs, result)
            return
        if func in _SOFTMAX:
            self._softmax(args, kwargs, result)
            return
        scores, probs = self._scores, self._probs
        for argument in args[:3]:
            if probs is not None and argument is probs:
                if result.shape == probs.shape:
                    self._probs = result  # dropout, cast
                return
            if scores is not None and argument is scores.tensor:
                self._pass_scores(scores, func, args, result)
                return
        self._pass_scaled(func, args, result)

    def finish(self) -> None:
        """The module's forward has ended."""
        if self._token is not None:
            self._deliver(None)
        self._scores = self._probs = None
        self._scaled.clear()

    def _deliver(self, values: Tensor | None) -> None:
        token, self._token, self._probs = self._token, None, None
        self._listener.values(token, values)

    # -- the steps ------------------------------------------------------------------------------------------

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        equation = None
        factor = 1.0
        if func is torch.einsum:
            equation, *operands = args
            if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
                operands = list(operands[0])
            if not isinstance(equation, str):
                return
        elif func in (torch.baddbmm, Tensor.baddbmm):
            operands = list(args[1:3])
            factor = float(kwargs.get("alpha", 1.0))
        else:
            operands = list(args[:2]) if len(args) > 1 else [*args, *kwargs.values()]
        if len(operands) != 2 or not all(isinstance(operand, Tensor) for operand in operands):
            return
        left, right = operands
        if self._probs is not None and (left is self._probs or right is self._probs):
            values = _values_of(equation, left, right, left_is_probs=left is self._probs)
            self._deliver(values)
            return
        if left.dim() < 3 or right.dim() < 3:
            return
        head_dim = left.shape[-1] if equation is None else _contracted(equation, left, right)
        if head_dim is None:
            return
        for operand in (left, right):
            factor *= self._factor_of(operand)
        self._scores = _Scores(result, factor, head_dim)

    def _softmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        source = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(source, Tensor) or source.dim() < 3 or dim not in (-1, source.dim() - 1):
            return
        scores = self._scores
        if scores is None or scores.tensor is not source:
            if source.dim() == 4:
                self._listener.refused(
                    "a softmax over logits that attnmon did not see made from queries and keys", source
                )
            return
        self._scores = None
        if self._token is not None:  # two softmaxes in a row: the first one's values were not found
            self._deliver(None)
        if scores.factor is None:
            self._listener.refused("the logits are scaled by a tensor whose value is not known to the host", source)
            return
        if not scores.factor > 0:
            self._listener.refused("the logits are scaled by a number that is not positive", source)
            return
        self._token = self._listener.softmax(SoftmaxSeen(source, scores.factor, scores.head_dim))
        self._probs = result if self._token is not None else None

    def _pass_scores(self, scores: _Scores, func: Any, args: tuple[Any, ...], result: Tensor) -> None:
        if result.numel() != scores.tensor.numel() or result.dtype == torch.bool:
            return
        factor = scores.factor
        if func in _MULTIPLY or func in _DIVIDE:
            others = [argument for argument in args[:2] if argument is not scores.tensor]
            change = _number(others[0]) if others else math.nan
            if func in _DIVIDE and change:
                change = 1.0 / change
            factor = None if factor is None or change is None else factor * change
        self._scores = _Scores(result, factor, scores.head_dim)

    def _pass_scaled(self, func: Any, args: tuple[Any, ...], result: Tensor) -> None:
        if result.dim() < 3 or func in _NORMALISE:
            return
        tensors = [argument for argument in args[:2] if isinstance(argument, Tensor)]
        factor = 1.0
        for tensor in tensors[:1] if len(tensors) > 1 else tensors:
            if tensor.numel() == result.numel():
                factor = self._factor_of(tensor)
        if func in _MULTIPLY or func in _DIVIDE:
            numbers = [_number(argument) for argument in args[:2] if not _is_big(argument)]
            if len(numbers) == 1 and numbers[0] is not None and numbers[0] != 0:
                factor *= 1.0 / numbers[0] if func in _DIVIDE else numbers[0]
        if factor != 1.0:
            self._scaled = [*self._scaled[-_MAX_SCALED + 1 :], (result, factor)]

    def _factor_of(self, tensor: Tensor) -> float:
        for known, factor in reversed(self._scaled):
            if known is tensor:
                return factor
        return 1.0


def _is_big(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.numel() > 1


def _number(argument: Any) -> float | None:
    """The value of a number; of a one-element tensor only where reading it does not wait for a device."""
    if isinstance(argument, Tensor):
        if argument.numel() != 1:
            return 1.0  # a mask or a per-key factor: no scale
        if torch.compiler.is_compiling() or argument.device.type != "cpu":
            return None
        return float(argument.detach())
    return float(argument) if isinstance(argument, (int, float)) else 1.0


def _subscripts(equation: str) -> tuple[str, str, str] | None:
    equation = equation.replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    inputs, output = equation.split("->")
    parts = inputs.split(",")
    return (parts[0], parts[1], output) if len(parts) == 2 else None


def _contracted(equation: str, left: Tensor, right: Tensor) -> int | None:
    """Size of the contracted axes of q.k; None if this is not a product of queries and keys."""
    names = _subscripts(equation)
    if names is None:
        return None
    first, second, output = names
    summed = [axis for axis in first if axis in second and axis not in output]
    if len(summed) != 1 or len(output) < 3 or output[-2] not in first or output[-1] not in second:
        return None
    del right
    return int(left.shape[first.index(summed[0])])


def _values_of(equation: str | None, left: Tensor, right: Tensor, *, left_is_probs: bool) -> Tensor | None:
    """The values as [..., Lk, Dv], their leading axes in the order of the weights'; None if unclear."""
    if equation is None:
        return right if left_is_probs else None
    names = _subscripts(equation)
    if names is None:
        return None
    probs, values = (names[0], names[1]) if left_is_probs else (names[1], names[0])
    tensor = right if left_is_probs else left
    own = [axis for axis in values if axis not in probs]
    if len(own) != 1 or probs[-1] not in values:
        return None
    leading = [axis for axis in probs[:-2] if axis in values]
    if len(leading) + 2 != len(values):
        return None
    tensor = tensor.permute(*(values.index(axis) for axis in (*leading, probs[-1], own[0])))
    for position, axis in enumerate(probs[:-2]):
        if axis not in values:
            tensor = tensor.unsqueeze(position)
    return tensor
