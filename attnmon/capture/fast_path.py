"""Layers of torch that run one fused kernel in evaluation, unless a module in them has a hook.

``nn.TransformerEncoderLayer.forward`` counts the hooks of its modules. So its own hook takes them all away where it
is in evaluation mode, and they come back as soon as the layer has chosen (see ``process_wide``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attnmon.capture.hooks import is_ours
from attnmon.capture.sites import Watched


class StockLayers:
    """Which watched modules are, or are inside, a layer that counts hooks.

    Args:
        watched: the watched modules, by index.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        index_of = {id(module): index for index, module in enumerate(reference() for reference, _ in watched)}
        self._inside: dict[int, list[int]] = {}
        self._layer: dict[int, int] = {}
        for index, (reference, _) in enumerate(watched):
            module = reference()
            if module is None or not _counts_hooks(module):
                continue
            inside = [index_of[id(inner)] for inner in nn.Module.modules(module) if id(inner) in index_of]
            self._inside[index] = inside
            self._layer.update(dict.fromkeys(inside, index))
        hooked = {index for index, inside in self._inside.items() if len(inside) > 1}
        self.indices = frozenset(hooked)

    def inside(self, index: int) -> list[int]:
        """A layer and the watched modules in it."""
        return self._inside.get(index, [])

    def own(self, index: int) -> nn.Module | None:
        """The module, if it is such a layer."""
        return self._watched[index][0]() if index in self._inside else None

    def layer_of(self, index: int) -> nn.Module | None:
        """The layer that a module is or is inside of."""
        layer = self._layer.get(index)
        return None if layer is None else self._watched[layer][0]()


def may_fuse(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer could choose the fused kernel in this call, were it not for attnmon's hooks.

    False where it cannot: in training, where gradients are wanted, under autocast, or with hooks of the user's.
    """
    if layer.training or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled():
        tensors = [given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor)]
        if any(tensor.requires_grad for tensor in (*tensors, *nn.Module.parameters(layer))):
            return False
    tables = (
        table for module in nn.Module.modules(layer) for table in (module._forward_hooks, module._forward_pre_hooks)
    )
    return all(is_ours(hook) for table in tables for hook in table.values())


def _counts_hooks(module: nn.Module) -> bool:
    return isinstance(module, nn.TransformerEncoderLayer) and (
        type(module).forward is nn.TransformerEncoderLayer.forward
    )
