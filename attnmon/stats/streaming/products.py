"""Batched products and gathers that read keys and values where they lie, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype, its vectors contiguous; the tensor itself if it is so already.

    Args:
        tensor: [..., E].
        dtype: of the result.
    """
    if tensor.dtype == dtype and tensor.stride(-1) == 1:
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def scores(rows: Tensor, vectors: Tensor, out: Tensor) -> Tensor:
    """rows @ vectors^T, without a copy of the vectors.

    Keys as models lay them out, [B, L, H, D] seen as [B, H, L, D], have axes that a batched product cannot fold into
    one, so ``matmul`` would copy them all; one product per sequence reads them in place.

    Args:
        rows: [S, G, R, E].
        vectors: [S, G, K, E].
        out: [S, G, R, K], overwritten with the result and returned.
    """
    num_s, num_g = vectors.shape[:2]
    foldable = num_s == 1 or vectors.stride(0) == num_g * vectors.stride(1)
    if foldable or vectors.device.type != "cpu":
        return torch.matmul(rows, vectors.transpose(-1, -2), out=out)
    for s in range(num_s):
        torch.bmm(rows[s], vectors[s].transpose(-1, -2), out=out[s])
    return out


def gather_vectors(vectors: Tensor, index: Tensor, group: int) -> Tensor:
    """Vectors of the indexed keys, of the head's own group.

    Args:
        vectors: [S, G, K, E].
        index: int64 [S, H, R, N], H = G * group.
        group: query heads per key head.

    Returns:
        [S, H, R, N, E].
    """
    table, rows = _as_table(vectors, index, group)
    return table.index_select(0, rows.flatten()).view(*index.shape, vectors.shape[3])


def weighted_vectors(vectors: Tensor, index: Tensor, factor: Tensor, group: int) -> Tensor:
    """Weighted sum of the indexed vectors of the head's own group.

    Args:
        vectors: [S, G, K, E].
        index: int64 [S, H, R, N], H = G * group.
        factor: [S, H, R, N], weights.
        group: query heads per key head.

    Returns:
        [S, H, R, E].
    """
    if vectors.device.type != "cpu":  # not every device has the operation below
        return (factor[..., None, :] @ gather_vectors(vectors, index, group)).squeeze(-2)
    table, rows = _as_table(vectors, index, group)
    flat = torch.nn.functional.embedding_bag(
        rows.flatten(0, 2), table, per_sample_weights=factor.flatten(0, 2), mode="sum"
    )
    return flat.view(*index.shape[:3], vectors.shape[3])


def lengths_of(vectors: Tensor) -> Tensor:
    """Euclidean lengths [S, G, K] of vectors [S, G, K, E], read in the order in which they lie in memory."""
    apart = vectors.stride(1) < vectors.stride(2)
    length: Tensor = torch.linalg.vector_norm(vectors.transpose(1, 2) if apart else vectors, dim=-1)
    return length.transpose(1, 2) if apart else length


def _as_table(vectors: Tensor, index: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """All vectors as rows of one [rows, E] table, without a copy where strides allow, and the indexed rows."""
    num_s, num_g, length, width = vectors.shape
    steps = vectors.stride()[:3]
    if vectors.stride(3) != 1 or any(step % width for step in steps):
        vectors = vectors.contiguous()
        steps = vectors.stride()[:3]
    # every vector begins at a multiple of its width: all of them are rows of one table
    by_s, by_g, by_k = (step // width for step in steps)
    num_rows = (num_s - 1) * by_s + (num_g - 1) * by_g + (length - 1) * by_k + 1
    table = vectors.as_strided((num_rows, width), (width, 1))
    head_group = torch.arange(index.shape[1], device=index.device) // group
    base = torch.arange(num_s, device=index.device)[:, None] * by_s + head_group * by_g  # [S, H]
    return table, base[:, :, None, None] + index * by_k
