"""Directions of the finite difference: random, yet the same for every run, batch split and rank.

The metric ``jacobian_fd`` (paper, Algorithm 5) moves a row's logits along one random unit vector. Every
implementation must move the same row along the same vector, and two micro-batches or two ranks must merge
into what one large batch would have given. So a direction is a function of *positions* alone, read from one
fixed table of standard normals, and no random state is touched:

    v_j = table[(direction_start(i) + j) % TABLE_SIZE]      over the row's visible keys j,
    divided by its Euclidean norm over those visible keys

with the query position i and the key positions j counted from the sequence's first key (of a packed batch:
the document's), so padding on either side moves nothing. i - first may be negative (a query before the first
visible key): ``%`` is Python's, never negative; on two's-complement integers it equals ``& (TABLE_SIZE - 1)``.
Batch index and head do not enter: all heads of a row share one direction, which costs nothing, since a head's
value is a mean over rows.

The multiplier is odd, so positions below TABLE_SIZE all start at different places. Rows of more than
TABLE_SIZE keys would repeat entries; that is harmless for a random direction.
"""

from __future__ import annotations

from functools import cache
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TABLE_SIZE = 2**18
"""Entries of the table: 1 MiB in float32, small enough to stay in a GPU's L2 cache."""

START_MULTIPLIER = 0x9E3779B1
"""Knuth's multiplicative hash; below 2**32, so int64 holds its product with positions up to 2**31."""

_SECOND_STREAM = 2**32  # counters of the second uniform never meet those of the first


@overload
def direction_start(query_position: int) -> int: ...
@overload
def direction_start(query_position: Tensor) -> Tensor: ...
def direction_start(query_position: int | Tensor) -> int | Tensor:
    """Where in the table a row's direction begins.

    Args:
        query_position: the query's position counted from its sequence's first key; an int, or an int64
            tensor of any shape. Magnitude up to 2**31.

    Returns:
        The same kind and shape, values in [0, TABLE_SIZE).
    """
    return (query_position * START_MULTIPLIER) % TABLE_SIZE


def direction_table(device: torch.device | str = "cpu") -> Tensor:
    """The table of standard normals, built once and cached per device; do not write into it.

    Entry c is made of counter c alone (splitmix64 hashes, then Box-Muller, in float64, rounded to float32).

    Args:
        device: where the table is to be.

    Returns:
        float32 [TABLE_SIZE].
    """
    device = torch.device(device)
    if str(device) == "cuda":  # no index: the same table as that of the current device
        device = torch.device("cuda", torch.cuda.current_device())
    return _table_on(device)


def direction_windows(start: Tensor, length: int) -> Tensor:
    """Successive entries of the table, from each of several starts.

    Args:
        start: int64 [...], taken modulo TABLE_SIZE.
        length: how many entries; beyond the table's last comes its first.

    Returns:
        float32 [..., length].
    """
    table = _repeated_table(start.device, 1 + -(-length // TABLE_SIZE))
    # rows of an overlapping view, so that nothing but the result is written
    windows = table.as_strided((TABLE_SIZE, length), (1, 1))
    return windows[(start % TABLE_SIZE).flatten()].view(*start.shape, length)


@cache
def _repeated_table(device: torch.device, times: int) -> Tensor:
    with torch.inference_mode(False):
        return direction_table(device).repeat(times)


@cache
def _table_on(device: torch.device) -> Tensor:
    # A monitored forward may run under inference_mode; the cached table has to outlive it.
    with torch.inference_mode(False):
        return torch.from_numpy(_normals()).to(device)


def _normals() -> NDArray[np.float32]:
    counter = np.arange(TABLE_SIZE, dtype=np.uint64)
    unit = 2.0**-53
    # (0, 1], so that the logarithm is finite
    radius_uniform = ((_splitmix64(counter) >> np.uint64(11)).astype(np.float64) + 1.0) * unit
    angle_uniform = (_splitmix64(counter + np.uint64(_SECOND_STREAM)) >> np.uint64(11)).astype(np.float64) * unit
    normals: NDArray[np.float64] = np.sqrt(-2.0 * np.log(radius_uniform)) * np.cos(2.0 * np.pi * angle_uniform)
    return normals.astype(np.float32)


def _splitmix64(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood's finalizer (OOPSLA 2014); arithmetic modulo 2**64."""
    state: NDArray[np.uint64] = (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
