"""Which axis of a product is which: queries and keys in, or weights and values in."""

from __future__ import annotations

from torch import Tensor

_SPARE = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _subscripts(equation: str, left: Tensor, right: Tensor) -> tuple[str, str, str] | None:
    """The axes of both operands and of the result, an ellipsis written out; None if they are not two."""
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    parts = inputs.split(",")
    if len(parts) != 2:
        return None
    if not arrow:
        letters = sorted(letter for letter in set(inputs) - {",", "."} if inputs.count(letter) == 1)
        output = ("..." if "..." in inputs else "") + "".join(letters)
    if "..." in inputs:
        spare = [letter for letter in _SPARE if letter not in equation]
        sizes = [tensor.dim() - len(part.replace("...", "")) for part, tensor in zip(parts, (left, right), strict=True)]
        longest = max(size for size, part in zip(sizes, parts, strict=True) if "..." in part)
        names = "".join(spare[:longest])
        parts = [
            part.replace("...", names[longest - size :] if size else "")
            for part, size in zip(parts, sizes, strict=True)
        ]
        output = output.replace("...", names)
    return parts[0], parts[1], output


def contracted_size(equation: str, left: Tensor, right: Tensor) -> int | None:
    """Size of the contracted axis of q.k; None if this is not a product of queries and keys."""
    names = _subscripts(equation, left, right)
    if names is None:
        return None
    first, second, output = names
    summed = [axis for axis in first if axis in second and axis not in output]
    if len(summed) != 1 or len(output) < 3:
        return None
    sides = {True: 0, False: 0}
    for axis in output[-2:]:  # queries from one, keys from the other
        if (axis in first) == (axis in second):
            return None
        sides[axis in first] += 1
    return int(left.shape[first.index(summed[0])]) if sides[True] == 1 else None


def values_of(equation: str | None, left: Tensor, right: Tensor, *, left_is_probs: bool) -> Tensor | None:
    """The values as [..., Lk, Dv], their leading axes in the order of the weights'; None if unclear."""
    if equation is None:
        return right if left_is_probs else None
    names = _subscripts(equation, left, right)
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
