"""What arguments of attention functions mean that several libraries share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
