"""Merging one step's matrices over data-parallel ranks: one packed collective per snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from attnmon.stats.packing import Packing


def world_size(group: Any = None) -> int:
    """Ranks of a process group; 1 where torch.distributed is not in use."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


class RankMerger:
    """Brings the matrices of all ranks together.

    The layout (which modules, how many heads) is agreed once, at the first merge. A rank that later has a module
    which is not in it raises a flag inside the packed data; every rank sees the flag, so all agree anew and pack again,
    and no rank ever enters a collective that another does not.

    Args:
        packing: layout of a module's matrix.
        group: process group; None for the default one.
    """

    def __init__(self, packing: Packing, group: Any = None) -> None:
        self._packing = packing
        self._group = group
        self._layout: dict[str, int] = {}

    def merge(self, step: int, local: dict[str, Tensor]) -> tuple[int, dict[str, NDArray[np.float64]]]:
        """A collective: every rank has to call it, with whatever it has.

        Args:
            step: the step's number, -1 from a rank that has none.
            local: path -> [columns, heads]; may be empty.

        Returns:
            The newest step of any rank, and path -> float64 [columns, heads] of the modules that some rank
            measured; the same on every rank.
        """
        if not self._layout:
            self._agree(local)
        everything = self._gather(step, local)
        if everything[:, 0].any():
            self._agree(local)
            everything = self._gather(step, local)
        merged, offset = {}, 2
        for path, count in self._layout.items():
            size = self._packing.num_columns * count
            pieces = everything[:, offset : offset + size].reshape(-1, self._packing.num_columns, count)
            offset += size
            if pieces[:, : self._packing.num_sums].any():
                merged[path] = self._packing.merge(pieces)
        return int(everything[:, 1].max()), merged

    def _gather(self, step: int, local: dict[str, Tensor]) -> NDArray[np.float64]:
        """[ranks, numbers]: a flag for modules that the layout lacks, the step, the layout's matrices."""
        unknown_modules = any(self._layout.get(path) != matrix.shape[1] for path, matrix in local.items())
        device = self._device()
        parts = [torch.tensor([unknown_modules, step], dtype=torch.float64, device=device)]
        for path, count in self._layout.items():
            matrix = local.get(path)
            if matrix is None or matrix.shape[1] != count:
                matrix = torch.zeros(self._packing.num_columns, count, dtype=torch.float64, device=device)
                matrix[self._packing.num_sums :] = -torch.inf
            parts.append(matrix.to(device, torch.float64).flatten())
        packed = torch.cat(parts)
        gathered = [torch.empty_like(packed) for _ in range(world_size(self._group))]
        dist.all_gather(gathered, packed, group=self._group)
        everything: NDArray[np.float64] = torch.stack(gathered).cpu().numpy()
        return everything

    def _agree(self, local: dict[str, Tensor]) -> None:
        everyone: list[Any] = [None] * world_size(self._group)
        heads = {path: matrix.shape[1] for path, matrix in local.items()}
        dist.all_gather_object(everyone, heads, group=self._group)
        found: dict[str, int] = {}
        for theirs in everyone:
            for path, count in theirs.items():
                found[path] = max(count, found.get(path, 0))
        # what was known stays: where layers are dropped at random, the layout is soon complete and settles
        self._layout = dict(sorted({**self._layout, **found}.items()))

    def _device(self) -> torch.device:
        if "nccl" in str(dist.get_backend(self._group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
