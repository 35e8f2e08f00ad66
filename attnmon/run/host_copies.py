"""Matrices on their way from the device to the host, so that no step waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST = 64  # steps on their way; a device that lags further than this is waited for


@dataclass(slots=True)
class _Copy:
    step: int
    matrices: dict[str, Tensor]  # on the host, perhaps not yet arrived
    events: list[torch.cuda.Event] = field(default_factory=list)

    def arrived(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


class HostCopies:
    """A queue of finished steps whose numbers have not been read yet."""

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque()
        self._held: tuple[int, dict[str, Tensor]] | None = None

    def put(self, step: int, matrices: dict[str, Tensor]) -> None:
        """Start copying a step's matrices [columns, heads] to the host: one copy per device, asynchronously."""
        copy = _Copy(step, {})
        by_device: dict[torch.device, list[str]] = {}
        for path, matrix in matrices.items():
            by_device.setdefault(matrix.device, []).append(path)
        for device, paths in by_device.items():
            if device.type == "cpu":
                copy.matrices.update((path, matrices[path]) for path in paths)
                continue
            flat = torch.cat([matrices[path].flatten() for path in paths])
            if device.type == "cuda":
                host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                host.copy_(flat, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                copy.events.append(event)
            else:
                host = flat.cpu()
            pieces = host.split([matrices[path].numel() for path in paths])
            copy.matrices.update(
                (path, piece.view(matrices[path].shape)) for path, piece in zip(paths, pieces, strict=True)
            )
        self._copies.append(copy)

    def ready(self, *, wait: bool) -> Iterator[tuple[int, dict[str, NDArray[np.float64]]]]:
        """Steps whose numbers have arrived, oldest first; all of them if ``wait``."""
        while self._copies:
            if wait or len(self._copies) > _MOST:
                self._copies[0].wait()
            elif not self._copies[0].arrived():
                return
            copy = self._copies.popleft()
            yield copy.step, {path: matrix.double().numpy() for path, matrix in copy.matrices.items()}

    def hold(self, step: int, matrices: dict[str, Tensor]) -> None:
        """Keep the newest step for a merge over ranks."""
        self._held = (step, matrices)

    def held(self) -> tuple[int, dict[str, Tensor]] | None:
        """The step kept for a merge, once."""
        held, self._held = self._held, None
        return held
