"""Merging one step's matrices over data-parallel ranks: one packed collective a snapshot."""

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

    The layout (which modules, how many heads) is agreed once, at the first merge. A rank that later sees a module
    which is not in it raises a flag inside the packed data, and all ranks agree anew at the next merge; so no rank
    ever enters a collective that another does not. That one step lacks the module.

    Args:
        packing: layout of a module's matrix.
        group: process group; None for the default one.
    """

    def __init__(self, packing: Packing, group: Any = None) -> None:
        self._packing = packing
        self._group = group
        self._layout: dict[str, int] | None = None
        self._renew = True

    def merge(self, step: int, local: dict[str, Tensor]) -> tuple[int, dict[str, NDArray[np.float64]]]:
        """A collective: every rank has to call it, with whatever it has.

        Args:
            step: the step's number, -1 from a rank that has none.
            local: path -> [columns, heads]; may be empty.

        Returns:
            The newest step of any rank, and path -> float64 [columns, heads] of the modules that some rank
            measured; the same on every rank.
        """
        heads = {path: matrix.shape[1] for path, matrix in local.items()}
        if self._renew or self._layout is None:
            self._layout = self._agree(heads)
            self._renew = False
        layout = self._layout
        strangers = any(layout.get(path) != count for path, count in heads.items())
        device = self._device()
        parts = [torch.tensor([strangers, step], dtype=torch.float64, device=device)]
        for path, count in layout.items():
            matrix = local.get(path)
            if matrix is None or matrix.shape[1] != count:
                matrix = torch.zeros(self._packing.num_columns, count, dtype=torch.float64, device=device)
                matrix[self._packing.num_sums :] = -torch.inf
            parts.append(matrix.to(device, torch.float64).flatten())
        packed = torch.cat(parts)
        gathered = [torch.empty_like(packed) for _ in range(world_size(self._group))]
        dist.all_gather(gathered, packed, group=self._group)
        everything = torch.stack(gathered).cpu().numpy()
        self._renew = bool(everything[:, 0].any())
        merged, offset = {}, 2
        for path, count in layout.items():
            size = self._packing.num_columns * count
            pieces = everything[:, offset : offset + size].reshape(-1, self._packing.num_columns, count)
            offset += size
            if pieces[:, : self._packing.num_sums].any():
                merged[path] = self._packing.merge(pieces)
        return int(everything[:, 1].max()), merged

    def _agree(self, heads: dict[str, int]) -> dict[str, int]:
        everyone: list[Any] = [None] * world_size(self._group)
        dist.all_gather_object(everyone, heads, group=self._group)
        known: dict[str, int] = {}
        for theirs in everyone:
            for path, count in theirs.items():
                known[path] = max(count, known.get(path, 0))
        # what was known stays: where layers are dropped at random, the layout soon is complete and settles
        return dict(sorted({**(self._layout or {}), **known}.items()))

    def _device(self) -> torch.device:
        if "nccl" in str(dist.get_backend(self._group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
