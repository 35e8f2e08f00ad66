"""Other ways of watching attention, as variants of the training step: what attnmon's cost is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PROBED_ROWS = 128


def missing(variant: str) -> str | None:
    """Why a variant cannot run here, or None."""
    if variant == "module-monitor" and find_spec("torch_module_monitor") is None:
        return "pip install torch-module-monitor"
    return None


def watched_by_module_monitor(model: nn.Module) -> Callable[[int], Any]:
    """Every attention call handed to torch-module-monitor's attention monitor, at every step.

    Returns what brackets a step: ``with bracket(step): forward and backward``.
    """
    from torch_module_monitor import ModuleMonitor
    from torch_module_monitor.attention import monitor_scaled_dot_product_attention

    # its reductions of activations are the user's to name; entropy is computed in any case
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True, excluded_modules_regex=".*")
    monitor.set_module(model)
    names = {module: name for name, module in model.named_modules()}

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        monitor_scaled_dot_product_attention(monitor, names[module], query, key, value, mask, is_causal=mask is None)
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[return-value]

    _use(model, "module_monitor", forward)

    class Bracket:
        def __init__(self, step: int) -> None:
            self.step = step

        def __enter__(self) -> None:
            monitor.begin_step(self.step)

        def __exit__(self, *_: Any) -> None:
            monitor.after_micro_batch()
            monitor.end_step()

    return Bracket


def watched_by_probe(model: nn.Module) -> list[Tensor]:
    """The probe style: softmax over 128 query rows x L keys of every sequence and head, and their entropy.

    Returns the list that every call appends its mean entropies [heads] to.
    """
    found: list[Tensor] = []

    @torch.no_grad()
    def look(query: Tensor, key: Tensor) -> None:
        length = query.shape[2]
        rows = torch.linspace(0, length - 1, min(PROBED_ROWS, length)).long()
        scores = query[:, :, rows].float() @ key.float().transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(torch.arange(length) > rows[:, None], -math.inf)
        p = scores.softmax(-1)
        found.append(-(p * p.clamp_min(1e-12).log()).sum(-1).mean((0, 2)))

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        look(query, key)
        return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[return-value]

    _use(model, "probe", forward)
    return found


def _use(model: nn.Module, name: str, forward: Callable[..., Any]) -> None:
    """Let ``model`` call ``forward`` for its attention; masks stay those of sdpa, none for a causal model."""
    AttentionInterface.register(f"benchmark_{name}", forward)
    model.config._attn_implementation = f"benchmark_{name}"  # type: ignore[union-attr]
