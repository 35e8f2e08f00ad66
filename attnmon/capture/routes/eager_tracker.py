"""Attention spelled out: a product of queries and keys, a softmax over keys, a product with the values.

The softmax's input is, to the last bit, what the definitions call logits: scale, softcap, bias and masks are in
it. What it does not tell is the scale, which the tracker follows through the arithmetic from product to softmax
(and on queries and keys that were scaled beforehand), and the values, which appear in the product afterwards. Two
things between product and softmax are not part of the logits: a learned sink, one more column that has no key and
is dropped after the softmax, and a number subtracted from a whole row. Tensors are told apart by identity and not
kept alive (those before a sink or a shift are, up to the softmax), since a model may go on with any of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmon.capture.observe import Normalized
from attnmon.capture.routes.contractions import contracted_size, values_of
from attnmon.capture.routes.eager_functions import (
    BIASED_PRODUCTS,
    CASTS,
    CONCATENATE,
    DIVIDE,
    MULTIPLY,
    NORMALIZE,
    PARTS,
    PIECES,
    PRODUCTS,
    PROJECT,
    RESHAPES,
    SOFTMAX,
    SUBTRACT,
    dim_of,
    is_big,
    is_row_shift,
    number_of,
    own_operations,
    own_tensor,
    per_head,
    product_operands,
    tensors_of,
)

_MAX_SCALED = 24  # scaled tensors remembered per module call: queries and keys on their way through a rotation
_MAX_SCORES = 8  # tensors between product and softmax, or between softmax and values


class _Identity:
    """Says whether a tensor is the one it was made for."""

    __slots__ = ("_reference",)

    def __init__(self, tensor: Tensor) -> None:
        # a compiler traces no weak references; its tensors have no memory
        self._reference: Any = tensor if torch.compiler.is_compiling() else weakref.ref(tensor)

    def of(self, tensor: Tensor) -> bool:
        if torch.compiler.is_compiling():
            return self._reference is tensor
        return self._reference() is tensor


@dataclass(slots=True)
class _Scores:
    identity: _Identity
    factor: float | None  # None: multiplied by something whose value is not known without waiting for it
    head_dim: int
    logits: Tensor | None = None  # the tensor before a sink was appended or the rows were shifted
    sinks: Tensor | None = None  # [H]
    trouble: str = ""  # why this cannot be measured, should it reach a softmax


@dataclass(slots=True)
class SoftmaxSeen:
    """A softmax over keys: its input and what is known of it."""

    logits: Tensor
    scale: float
    head_dim: int
    sinks: Tensor | None = None
    normalized: Normalized | None = None  # it was no softmax, and this is what it made


class SoftmaxListener(Protocol):
    """Who is told of a module's softmax."""

    def softmax(self, seen: SoftmaxSeen) -> Any:
        """Its input, before anything else happens to it; the answer is handed back with the values."""

    def values(self, token: Any, values: Callable[[], Tensor | None], *, used: bool) -> None:
        """Gives the values, or None if they are unclear; ``used``: whether the weights entered a product at all."""

    def refused(self, reason: str, tensor: Tensor) -> None:
        """A softmax that cannot be measured, and some tensor of it."""


class EagerTracker:
    """Follows one module's arithmetic; told of every torch call the module makes, after it was made.

    Args:
        listener: told of each softmax over keys.
        outer: the tracker of the enclosing module: a softmax, a mask or dropout may be a small module of its own.
    """

    def __init__(self, listener: SoftmaxListener, outer: EagerTracker | None = None) -> None:
        self._listener = listener
        self._outer = outer
        self._scores: list[_Scores] = []
        self._scaled: list[tuple[_Identity, float]] = []
        self._probs: list[tuple[_Identity, int]] = []  # and the columns that it still has for a sink
        self._token: Any = None

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at one torch call and its result."""
        operands = tensors_of(args, kwargs)
        if not operands:
            return
        tracker: EagerTracker | None = self
        while tracker is not None:
            if tracker._takes(func, args, kwargs, operands, result):
                return
            tracker = tracker._outer
        if func in PRODUCTS:
            if isinstance(result, Tensor):
                self._product(func, args, kwargs, result)
        elif func in SOFTMAX:
            source = operands[0]
            if source.dim() == 4 and dim_of(args, kwargs) in (-1, 3):
                reason = "a softmax over logits that attnmon did not see made from queries and keys"
                self._listener.refused(reason, source)
        else:
            self._pass_scaled(func, args, operands, result)

    def normalized(self, given: Normalized) -> None:
        """A function that is no torch function has made weights, as a softmax would."""
        source, weights = given.source, given.weights
        if not isinstance(source, Tensor) or not isinstance(weights, Tensor):
            return
        tracker: EagerTracker | None = self
        while tracker is not None:
            for scores in tracker._scores:
                if scores.identity.of(source):
                    tracker._softmax(scores, source, given.dim, weights, given)
                    return
            tracker = tracker._outer
        if source.dim() == 4 and given.dim in (-1, 3):
            reason = f"{given.name} over logits that attnmon did not see made from queries and keys"
            self._listener.refused(reason, source)

    def factor_of(self, tensor: Tensor) -> float:
        """What a tensor was multiplied by since it left its projection."""
        tracker: EagerTracker | None = self
        while tracker is not None:
            for known, factor in reversed(tracker._scaled):
                if known.of(tensor):
                    return factor
            for scores in tracker._scores:  # queries made by a product, then scaled
                if scores.identity.of(tensor):
                    return 1.0 if scores.factor is None else scores.factor
            tracker = tracker._outer
        return 1.0

    def finish(self) -> None:
        """The module's forward has ended."""
        if self._token is not None:
            self._deliver(_no_values, used=False)
        self._probs.clear()
        self._scores.clear()
        self._scaled.clear()

    def _deliver(self, values: Callable[[], Tensor | None], *, used: bool) -> None:
        token, self._token = self._token, None
        self._probs.clear()
        self._listener.values(token, values, used=used)

    # -- what is on its way --------------------------------------------------------------------------------

    def _takes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: list[Tensor], result: Any
    ) -> bool:
        """Whether the call is one with this tracker's weights or scores; then it is dealt with."""
        if self._probs or self._scores:
            for operand in operands:
                for identity, sinks in self._probs:
                    if identity.of(operand):
                        self._pass_probs(func, args, kwargs, operand, sinks, result)
                        return True
                for scores in self._scores:
                    if scores.identity.of(operand):
                        return self._take_scores(func, args, kwargs, operands, scores, operand, result)
        return False

    def _take_scores(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], operands: list[Tensor], scores: _Scores,
        tensor: Tensor, result: Any,
    ) -> bool:  # fmt: skip
        if func in SOFTMAX:
            self._softmax(scores, tensor, dim_of(args, kwargs), result)
            return True
        if func in PRODUCTS:
            return False  # queries that were themselves made by a product
        if func in CONCATENATE:
            self._concatenate(scores, tensor, operands, dim_of(args, kwargs, default=0), result)
        elif func is F.pad:
            self._pad(scores, tensor, args, kwargs, result)
        elif isinstance(result, Tensor):
            self._pass_scores(scores, tensor, func, args, operands, result)
        return True

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        found = product_operands(func, args, kwargs)
        if found is None:
            return
        equation, left, right = found
        if left.dim() < 3 or right.dim() < 3:
            return
        head_dim = left.shape[-1] if equation is None else contracted_size(equation, left, right)
        if head_dim is None:
            return
        factor = 1.0
        if func in BIASED_PRODUCTS:
            factor = float(kwargs.get("alpha", 1.0))
        for operand in (left, right):
            factor *= self.factor_of(operand)
        self._note(_Scores(_Identity(result), factor, head_dim))

    def _note(self, scores: _Scores) -> None:
        self._scores = [*self._scores[-_MAX_SCORES + 1 :], scores]

    def _softmax(self, scores: _Scores, source: Tensor, dim: Any, result: Any, given: Normalized | None = None) -> None:
        if source.dim() < 3 or not isinstance(result, Tensor):
            return
        self._scores.clear()
        if self._token is not None:  # two softmaxes in a row: the first one's values were not found
            self._deliver(_no_values, used=False)
        if dim not in (-1, source.dim() - 1):
            self._listener.refused("a softmax over another axis than the last", source)
            return
        trouble = scores.trouble or ("" if given is None else _trouble_with(given, scores))
        if trouble:
            self._listener.refused(trouble, source)
            return
        if scores.factor is None:
            self._listener.refused("the logits are scaled by a tensor whose value is not known to the host", source)
            return
        if not scores.factor > 0:
            self._listener.refused("the logits are scaled by a number that is not positive", source)
            return
        logits = source if scores.logits is None else scores.logits
        seen = SoftmaxSeen(logits, scores.factor, scores.head_dim, scores.sinks, given)
        self._token = self._listener.softmax(seen)
        if self._token is not None:
            self._probs.append((_Identity(result), 0 if scores.sinks is None else 1))

    def _pass_scores(
        self, scores: _Scores, tensor: Tensor, func: Any, args: tuple[Any, ...], operands: list[Tensor], result: Tensor
    ) -> None:
        if result.dtype == torch.bool or result.numel() < tensor.numel() or result.dim() < 3:
            return
        factor, logits, sinks, trouble = scores.factor, scores.logits, scores.sinks, scores.trouble
        if func in MULTIPLY or func in DIVIDE:
            others = [argument for argument in args[:2] if argument is not tensor]
            change = number_of(others[0]) if others else math.nan
            if func in DIVIDE and change:
                change = 1.0 / change
            factor = None if factor is None or change is None else factor * change
        else:
            for other in self._scores:  # the sum of two products
                if other is not scores and any(other.identity.of(operand) for operand in operands):
                    factor = factor if factor == other.factor else None
        if func in SUBTRACT and is_row_shift(args, tensor):
            logits = tensor if logits is None else logits
        elif logits is not None and func not in CASTS:
            trouble = trouble or "the logits are changed after a sink was appended or each row was shifted"
        if result is tensor:  # in place
            self._scores = [known for known in self._scores if known is not scores]
        self._note(_Scores(_Identity(result), factor, scores.head_dim, logits, sinks, trouble))

    def _concatenate(self, scores: _Scores, tensor: Tensor, operands: list[Tensor], dim: Any, result: Any) -> None:
        if not isinstance(result, Tensor) or dim not in (-1, tensor.dim() - 1):
            return
        others = [operand for operand in operands if operand is not tensor]
        if len(others) == 1 and others[0].shape[-1] == 1 and scores.sinks is None:
            sinks = per_head(others[0])
            trouble = "" if sinks is not None else "a column without a key that differs from row to row"
            kept = _Scores(_Identity(result), scores.factor, scores.head_dim, tensor, sinks, scores.trouble or trouble)
        else:  # for instance the keys of two sources
            kept = _Scores(_Identity(result), scores.factor, scores.head_dim, None, None, scores.trouble)
            if scores.logits is not None:
                kept.trouble = "the logits are joined to others after each row was shifted or a sink was appended"
        self._note(kept)

    def _pad(
        self, scores: _Scores, tensor: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if not isinstance(result, Tensor):
            return
        width = kwargs.get("pad", args[1] if len(args) > 1 else ())
        value = kwargs.get("value", args[3] if len(args) > 3 else None)
        trouble = scores.trouble
        sinks = None
        if tensor.dim() == 4 and len(width) == 2 and sum(width) == 1 and scores.logits is None:
            with own_operations():
                sinks = tensor.new_full((tensor.shape[1],), 0.0 if value is None else float(value))
        else:
            trouble = trouble or "the logits are padded"
        self._note(_Scores(_Identity(result), scores.factor, scores.head_dim, tensor, sinks, trouble))

    def _pass_probs(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], probs: Tensor, sinks: int, result: Any
    ) -> None:
        if func in PRODUCTS:
            found = product_operands(func, args, kwargs)
            if found is None:
                return
            equation, left, right = found
            if sinks:
                self._token = None
                self._probs.clear()
                self._listener.refused("a column was appended to the logits that has values of its own", probs)
                return
            is_left = left is probs
            self._deliver(
                lambda: values_of(equation, own_tensor(left), own_tensor(right), left_is_probs=is_left), used=True
            )
            return
        pieces = result if isinstance(result, (tuple, list)) else (result,)
        for piece in pieces:
            if not isinstance(piece, Tensor) or not piece.is_floating_point():
                continue
            if piece.shape == probs.shape or (func in RESHAPES and piece.numel() == probs.numel()):
                columns = sinks  # dropout, cast, [B, H, L, L] as [B * H, L, L]
            elif sinks and func in PIECES and piece.shape == (*probs.shape[:-1], probs.shape[-1] - sinks):
                columns = 0
            else:
                continue
            self._probs = [*self._probs[-_MAX_SCORES + 1 :], (_Identity(piece), columns)]
            return

    def _pass_scaled(self, func: Any, args: tuple[Any, ...], operands: list[Tensor], result: Any) -> None:
        """Queries or keys on their way from their projection to the product."""
        if func in NORMALIZE or func in PROJECT:
            return
        pieces = result if isinstance(result, (tuple, list)) else (result,)
        first = pieces[0] if pieces else None
        if not isinstance(first, Tensor) or first.dim() < 3 or not first.is_floating_point():
            return
        factor = 1.0
        for operand in operands:
            factor = self.factor_of(operand)
            if factor != 1.0:
                break
        if func in CONCATENATE and any(self.factor_of(operand) != factor for operand in operands):
            factor = 1.0
        if func in MULTIPLY or func in DIVIDE:
            numbers = [number_of(argument) for argument in args[:2] if not is_big(argument)]
            if len(numbers) == 1 and numbers[0] is not None and numbers[0] != 0:
                factor *= 1.0 / numbers[0] if func in DIVIDE else numbers[0]
        elif func not in PARTS and first.numel() < max(operand.numel() for operand in operands):
            return  # for instance a sum
        if factor != 1.0:
            news = [(_Identity(piece), factor) for piece in pieces if isinstance(piece, Tensor)]
            self._scaled = [*self._scaled, *news][-_MAX_SCALED:]


def _no_values() -> None:
    return None


def _trouble_with(given: Normalized, scores: _Scores) -> str:
    if torch.compiler.is_compiling():
        return f"{given.name} in a compiled graph"
    return given.trouble or ("" if scores.sinks is None else f"{given.name} with a sink")
