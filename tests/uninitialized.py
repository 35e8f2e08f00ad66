"""Memory that nobody has written to is NaN where attnmon gets it, so that what reads it shows.

``torch.empty`` itself stays: the compiler has to know it. attnmon's modules get a ``torch`` of their own instead.
"""

import math
import sys
import types

import torch

# modules that call torch.empty or torch.empty_like
EMPTY = {
    "attnmon.paper.sweep",
    "attnmon.run.host_copies",
    "attnmon.run.ranks",
    "attnmon.stats.fused.scratch",
    "attnmon.stats.reference",
    "attnmon.stats.streaming.products",
    "attnmon.stats.streaming.scratch",
}
SCRATCH = "attnmon.stats.streaming.scratch"


def filled(tensor):
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor


class FilledTorch(types.ModuleType):
    """``torch``, but for the functions that leave memory as it is."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *size, **options):
        return filled(torch.empty(*size, **options))

    def empty_like(self, tensor, **options):
        return filled(torch.empty_like(tensor, **options))


FILLED_TORCH = FilledTorch("torch")
_new_empty = torch.Tensor.new_empty


def new_empty(tensor, *size, **options):
    made = _new_empty(tensor, *size, **options)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return filled(made) if caller.startswith("attnmon") else made


def filled_scratch(*args):
    """The buffers of ``scratch`` outlive a call: what is left in them counts as unwritten, too."""
    return filled(sys.modules[SCRATCH].scratch(*args))


def fill():
    """In every module of attnmon that has been imported by now."""
    torch.Tensor.new_empty = new_empty
    for name, module in list(sys.modules.items()):
        if not name.startswith("attnmon."):
            continue
        if name in EMPTY:
            module.torch = FILLED_TORCH
        if name != SCRATCH and hasattr(module, "scratch") and module.scratch is sys.modules[SCRATCH].scratch:
            module.scratch = filled_scratch
