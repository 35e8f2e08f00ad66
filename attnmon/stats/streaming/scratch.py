"""Working memory that outlives a call: on a CPU a fresh tensor of megabytes costs more in page faults than its sums.

Buffers belong to a thread, so that replicas that run in threads do not share them, and are as large as the largest
block that was measured there: a bounded number of logits (``blocks.BLOCK_CPU``), whatever the length of the rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}


_buffers = _Buffers()


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """A contiguous tensor whose contents are undefined.

    On a CPU it shares memory with the last tensor of that name in this thread; on devices with a caching allocator it
    is a new tensor.

    Args:
        name: of the buffer.
        shape: of the tensor.
        like: a tensor of the wanted dtype and device.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    size = math.prod(shape) * like.element_size()
    buffer = _buffers.by_name.get(name)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # usable in and outside of inference mode alike
            buffer = torch.empty(size, dtype=torch.uint8, device=like.device)  # whatever the default device is
        _buffers.by_name[name] = buffer
    return buffer[:size].view(like.dtype).view(shape)
