"""What arguments of attention functions mean that several libraries share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnmon.capture.below import plain
from attnmon.errors import UnsupportedAttention


def matched_boundaries(queries: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One ``cu_seqlens`` for queries and keys, and a mask that hides everything should they differ after all.

    Where comparing them would wait for the device, rows of differing ones become rows without a visible key.

    Raises:
        UnsupportedAttention: they differ.
    """
    if keys is None or keys is queries:
        return queries, None
    if keys.shape != queries.shape:
        raise UnsupportedAttention("packed sequences with other boundaries for keys than for queries")
    if torch.compiler.is_compiling() or queries.device.type != "cpu":
        return queries, (queries == keys).all().view(1, 1, 1, 1)
    if not torch.equal(queries.to(keys.dtype), keys):
        raise UnsupportedAttention("packed sequences with other boundaries for keys than for queries")
    return queries, None


def number(name: str, given: Any) -> float | None:
    """A scale or softcap as a number.

    Raises:
        UnsupportedAttention: it is a tensor whose value is not known to the host.
    """
    if isinstance(given, Tensor):
        if torch.compiler.is_compiling() or given.device.type != "cpu" or given.numel() != 1:
            raise UnsupportedAttention(f"{name} is a tensor whose value is not known to the host")
        return float(given)
    return None if given is None else float(given)


def without_wrapping(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """The arguments of a call without what ``torch.func`` has wrapped, and their tensors: (as given, without).

    Raises:
        UnsupportedAttention: a tensor has no numbers of its own here.
    """
    tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def unwrap(given: Any) -> Any:
        if isinstance(given, Tensor):
            if id(given) not in tensors:
                tensors[id(given)] = (given, plain(given))
            return tensors[id(given)][1]
        if type(given) is tuple or type(given) is list:
            return type(given)(unwrap(item) for item in given)
        return given

    unwrapped = tuple(unwrap(given) for given in args), {name: unwrap(given) for name, given in kwargs.items()}
    return *unwrapped, list(tensors.values())
