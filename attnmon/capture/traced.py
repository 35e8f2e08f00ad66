"""Capture inside compiled graphs: an operator that the compiler keeps but does not look into.

While a graph is traced, hooks and the function mode leave calls of this operator in it, each with the number of
the recorder and of the site. When the graph runs, the operator hands the tensors to the recorder as an eager call
would. It claims to write to a one-element buffer, so that no compiler removes or reorders it.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnmon.capture.eager import SoftmaxSeen

if TYPE_CHECKING:
    from attnmon.capture.replay import Replay


class CheckpointedGraphs:
    """Lets a graph be traced whose activation checkpointing has watched modules inside.

    Hooks note which module runs; the compiler takes that for a side effect that a recomputation might lack.
    """

    _OPTION = "skip_fwd_side_effects_in_bwd_under_checkpoint"

    def __init__(self) -> None:
        self._config: Any = None
        self._before = False

    def install(self) -> None:
        """Say that these side effects are not wanted in the backward."""
        config = sys.modules.get("torch._dynamo.config")
        if self._config is None and hasattr(config, self._OPTION):
            self._config, self._before = config, getattr(config, self._OPTION)
            setattr(config, self._OPTION, True)

    def remove(self) -> None:
        """Say what was said before."""
        if self._config is not None:
            setattr(self._config, self._OPTION, self._before)
            self._config = None


ORDER: dict[torch.device, Tensor] = {}
"""The one-element buffer of each device. A global, so that any traced function can read it."""


def graphs_were_broken() -> bool:
    """Whether anything that this process has compiled so far broke into several graphs."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return utilities is not None and bool(utilities.counters.get("graph_break"))


def prepare(device: torch.device) -> None:
    """Make sure that graphs on ``device`` have their buffer."""
    if device not in ORDER:
        with torch.inference_mode(False):
            ORDER[device] = torch.zeros(1, device=device)


_REPLAYS: weakref.WeakValueDictionary[int, Replay] = weakref.WeakValueDictionary()
_counter = 0


def register(replay: Replay) -> int:
    """A number by which the operators find a recorder's replay; it does not keep that alive."""
    global _counter
    _counter += 1
    _REPLAYS[_counter] = replay
    return _counter


@torch.library.custom_op("attnmon::observe", mutates_args=("order",))
def observe(
    order: Tensor,
    recorder: int,
    site: int,
    route: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    hidden: Tensor | None,
    scale: float | None,
    softcap: float | None,
    window_left: int | None,
    window_right: int | None,
    causal_offset: int,
    is_causal: bool,
    is_cross: bool,
    prescale: float,
) -> None:
    """A call given by queries and keys; arguments as of ``attnmon.calls.make_call``."""
    found = _REPLAYS.get(recorder)
    if found is not None:
        window = None if window_left is None and window_right is None else (window_left, window_right)
        described: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "attn_mask": attn_mask,
            "key_padding_mask": key_padding_mask,
            "sinks": sinks,
            "cu_seqlens": cu_seqlens,
            "hidden": hidden,
            "scale": scale,
            "softcap": softcap,
            "window": window,
            "causal_offset": causal_offset,
            "is_causal": is_causal,
            "is_cross": is_cross,
            "prescale": prescale,
        }
        found.call(site, route, described)


@torch.library.custom_op("attnmon::observe_logits", mutates_args=("order",))
def observe_logits(
    order: Tensor,
    recorder: int,
    site: int,
    logits: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    head_dim: int,
    heads: int,
    is_cross: bool,
) -> None:
    """A call given by the softmax's input, [B, H, Lq, Lk] or with heads and sequences folded together."""
    found = _REPLAYS.get(recorder)
    if found is not None:
        found.logits(site, SoftmaxSeen(logits, scale, head_dim, sinks), heads, is_cross, value)


@torch.library.custom_op("attnmon::observe_rows", mutates_args=("order",))
def observe_rows(
    order: Tensor,
    recorder: int,
    site: int,
    route: str,
    logits: Tensor,
    positions: Tensor,
    value: Tensor,
    scale: float,
    head_dim: int,
) -> None:
    """A call given by some rows of logits [S, H, R, Lk] at query positions [R]; site -1: whichever is running."""
    found = _REPLAYS.get(recorder)
    if found is not None:
        found.rows(site, route, logits, positions, value, scale, head_dim)


@torch.library.custom_op("attnmon::refuse", mutates_args=("order",))
def refuse(order: Tensor, recorder: int, site: int, reason: str) -> None:
    """A call that is not measured."""
    found = _REPLAYS.get(recorder)
    if found is not None:
        found.refusal(site, reason)


@observe.register_fake
def _(*args: Any, **kwargs: Any) -> None:
    return None


@observe_logits.register_fake
def _(*args: Any, **kwargs: Any) -> None:
    return None


@observe_rows.register_fake
def _(*args: Any, **kwargs: Any) -> None:
    return None


@refuse.register_fake
def _(*args: Any, **kwargs: Any) -> None:
    return None
