"""The K largest entries of each row, ties by lowest index."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 8  # keys per chunk of the two-level search on a CPU


def largest(values: Tensor, count: int, tie_rank: int, floor: float) -> tuple[Tensor, Tensor]:
    """The ``count`` largest entries along the last axis, in descending order, and their indices.

    The first ``tie_rank`` of them are a set that does not depend on the implementation: of equal entries
    those with the lowest index come first. Entries at or below ``floor`` (masked keys) are not ordered.

    Args:
        values: float32 [..., L], no NaN.
        count: at most L.
        tie_rank: at most ``count``.
        floor: entries this low do not matter.

    Returns:
        values [..., count] and int64 indices [..., count].
    """
    if values.device.type != "cpu":
        # a tie would have to be looked for on the host; a stable sort answers without waiting
        ordered, index = values.sort(dim=-1, descending=True, stable=True)
        return ordered[..., :count], index[..., :count]
    top, index = _largest_cpu(values, count)
    if count > tie_rank:
        tied = (top[..., tie_rank - 1] == top[..., tie_rank]) & (top[..., tie_rank] > floor)
        if tied.any():
            ordered, stable = values[tied].sort(dim=-1, descending=True, stable=True)
            top[tied] = ordered[..., :count]
            index[tied] = stable[..., :count]
    return top, index


def _largest_cpu(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    length = values.shape[-1]
    chunks = length // _CHUNK
    if chunks < 2 * count or length % _CHUNK:
        top, index = values.topk(count, dim=-1)
        return top, index
    # the count largest lie in the count chunks with the largest maxima; chunk c holds keys c, c + chunks, ...
    by_chunk = values.view(*values.shape[:-1], _CHUNK, chunks)
    best = by_chunk.amax(-2).topk(count, dim=-1, sorted=False).indices
    spread = best.unsqueeze(-2).expand(*best.shape[:-1], _CHUNK, count)
    candidates = by_chunk.gather(-1, spread)
    top, place = candidates.flatten(-2).topk(count, dim=-1)
    offset = torch.div(place, count, rounding_mode="floor")
    return top, offset * chunks + best.gather(-1, place - offset * count)
