"""The torch functions that eager attention is made of, and how to read their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmon.capture.below import below_modes, plain

PRODUCTS: frozenset[Any] = frozenset(
    {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, torch.einsum}
    | {torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
)
BIASED_PRODUCTS: frozenset[Any] = frozenset({torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_})
MULTIPLY: frozenset[Any] = frozenset(
    {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.multiply_}
    | {Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
)
DIVIDE: frozenset[Any] = frozenset(
    {torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.div_, Tensor.divide, Tensor.divide_}
    | {Tensor.__truediv__, Tensor.__itruediv__, Tensor.true_divide, Tensor.true_divide_}
)
SUBTRACT: frozenset[Any] = frozenset(
    {torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.subtract, Tensor.__sub__, Tensor.__isub__}
)
CONCATENATE: frozenset[Any] = frozenset({torch.cat, torch.concat, torch.concatenate})
SOFTMAX: frozenset[Any] = frozenset({torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax})
NORMALIZE: frozenset[Any] = frozenset({F.layer_norm, F.rms_norm, F.normalize, F.group_norm, torch.layer_norm})
PROJECT: frozenset[Any] = frozenset({F.linear, F.conv1d, F.embedding, torch.addmm, Tensor.addmm, torch.mm, Tensor.mm})
CASTS: frozenset[Any] = frozenset(
    {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double}
    | {Tensor.contiguous, torch.clone, Tensor.clone, Tensor.detach}
)
RESHAPES: frozenset[Any] = frozenset(
    {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten}
    | {Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze, Tensor.view_as, Tensor.reshape_as}
)
PIECES: frozenset[Any] = frozenset(
    {Tensor.__getitem__, Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.unbind, torch.unbind}
    | {Tensor.narrow, torch.narrow, Tensor.split_with_sizes, torch.split_with_sizes, Tensor.tensor_split}
)

PARTS = PIECES | CONCATENATE  # a result smaller or larger than what it is made of


def own_tensor(tensor: Tensor) -> Tensor:
    """A tensor for operations of attnmon's own: without what ``torch.func`` has wrapped."""
    return tensor if torch.compiler.is_compiling() else plain(tensor)


def own_operations() -> AbstractContextManager[None]:
    """For operations that the model did not ask for."""
    return nullcontext() if torch.compiler.is_compiling() else below_modes()


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, those in lists included."""
    found: list[Tensor] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += [item for item in argument if isinstance(item, Tensor)]
    return found


def product_operands(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str | None, Tensor, Tensor] | None:
    """(equation or None, left, right) of a product; None if it is none of two tensors."""
    equation = None
    if func is torch.einsum:
        equation, *rest = args
        operands = tensors_of(tuple(rest), {})
        if not isinstance(equation, str):
            return None
    else:
        operands = tensors_of(args, {name: given for name, given in kwargs.items() if name != "out"})
        if func in BIASED_PRODUCTS:
            operands = operands[1:]
    return (equation, operands[0], operands[1]) if len(operands) == 2 else None


def dim_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], default: Any = None) -> Any:
    """The axis that a call names."""
    if "dim" in kwargs or "axis" in kwargs:
        return kwargs.get("dim", kwargs.get("axis"))
    return args[1] if len(args) > 1 else default


def is_big(argument: Any) -> bool:
    """Whether this is a tensor of more than one number."""
    return isinstance(argument, Tensor) and argument.numel() > 1


def number_of(argument: Any) -> float | None:
    """The value of a factor; of a tensor only where reading it does not wait for a device, 1 if it is no scale."""
    if isinstance(argument, Tensor):
        if argument.numel() != 1:
            # one number per head is a temperature; what differs along rows or keys is a mask or a bias
            is_scale = argument.dim() >= 3 and argument.shape[-1] == 1 and argument.shape[-2] == 1
            return None if is_scale else 1.0
        if torch.compiler.is_compiling() or argument.device.type != "cpu":
            return None
        with own_operations():
            return float(own_tensor(argument).detach())
    return float(argument) if isinstance(argument, (int, float)) else 1.0


def is_row_shift(args: tuple[Any, ...], tensor: Tensor) -> bool:
    """Whether something is subtracted that is the same for a whole row, for instance its maximum."""
    if len(args) < 2 or args[0] is not tensor:
        return False
    other = args[1]
    return isinstance(other, Tensor) and (other.dim() == 0 or other.shape[-1] == 1 < tensor.shape[-1])


def per_head(column: Tensor) -> Tensor | None:
    """[H] from [B, H, Lq, 1] if it says the same of every sequence and query."""
    if column.dim() != 4:
        return None
    with own_operations():
        return _per_head_of(own_tensor(column).detach())


def _per_head_of(column: Tensor) -> Tensor | None:
    batch, _, length, _ = column.shape
    same = (batch == 1 or column.stride(0) == 0) and (length == 1 or column.stride(2) == 0)
    if not same:
        if torch.compiler.is_compiling() or column.device.type != "cpu":
            return None
        if not bool((column == column[:1, :, :1]).all()):
            return None
    return column[0, :, 0, 0]
