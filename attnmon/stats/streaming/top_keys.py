"""The K largest entries of each row, ties by lowest index."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmon.stats.streaming.scratch import scratch

_CHUNKS = (32, 16, 8, 4)  # keys per chunk that the two-level search on a CPU may use


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
        # to ask whether there is a tie would wait for the device; a stable sort needs no answer
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


def leading(of_largest: Tensor) -> Tensor:
    """[S, H, R, K] as [K, S, H, R], contiguous, so that operations on a few numbers per row run along the rows."""
    return of_largest.movedim(-1, 0).contiguous()


def chunk_size(length: int, count: int) -> int:
    """Keys per chunk of the two-level search: 1 where one search over all keys is cheaper.

    The search looks at length / chunk maxima, then at chunk * count candidates.

    Args:
        length: keys.
        count: how many of the largest are looked for.
    """
    fitting = [chunk for chunk in _CHUNKS if length % chunk == 0 and length // chunk >= count]
    best = min(fitting, key=lambda chunk: length / chunk + chunk * count, default=1)
    return best if best > 1 and length / best + best * count < 0.7 * length else 1


def _largest_cpu(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    length = values.shape[-1]
    chunk = chunk_size(length, count)
    if chunk == 1:
        top, index = values.topk(count, dim=-1)
        return top, index
    chunks = length // chunk
    # the count largest lie in the count chunks with the largest maxima; chunk c holds keys c, c + chunks, ...
    by_chunk = values.view(*values.shape[:-1], chunk, chunks)
    maxima = torch.amax(by_chunk, -2, out=scratch("work", (*values.shape[:-1], chunks), values))
    best = maxima.topk(count, dim=-1, sorted=False).indices
    spread = best.unsqueeze(-2).expand(*best.shape[:-1], chunk, count)
    candidates = torch.gather(by_chunk, -1, spread, out=scratch("work", spread.shape, values))
    top, place = candidates.flatten(-2).topk(count, dim=-1)
    offset = torch.div(place, count, rounding_mode="floor")
    return top, offset * chunks + best.gather(-1, place - offset * count)
