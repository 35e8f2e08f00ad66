"""Capture inside compiled graphs: an operator that the compiler keeps but does not look into.

While a graph is traced, hooks and the function mode leave calls of this operator in it, each with the module's
token: an int64 tensor on the host, [number of the recorder, index of the site]. It is an input of the graph, so that
modules that are alike share one. When the graph runs, the operator hands the tensors to the recorder as an eager call
would. It claims to write to a one-element buffer, so that no compiler removes or reorders it.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from attnmon.capture.below import below_modes
from attnmon.capture.routes.eager_tracker import SoftmaxSeen

if TYPE_CHECKING:
    from attnmon.capture.compiled.replay import Replay


ORDER: dict[torch.device, Tensor] = {}
"""The one-element buffer of each device. A global, so that any traced function can read it."""


def prepare(device: torch.device) -> None:
    """Make sure that graphs on ``device`` have their buffer."""
    if device not in ORDER:
        with below_modes():
            ORDER[device] = torch.zeros(1, device=device)


_REPLAYS: weakref.WeakValueDictionary[int, Replay] = weakref.WeakValueDictionary()
_counter = 0


def register(replay: Replay) -> int:
    """A number by which the operators find a recorder's replay; it does not keep that alive."""
    global _counter
    _counter += 1
    _REPLAYS[_counter] = replay
    return _counter


def _find(token: Tensor) -> tuple[Replay | None, int]:
    """Who replays a call, and the index of its site; a token is on the host."""
    with below_modes():
        recorder, site = token.tolist()
    return _REPLAYS.get(recorder), site


def _observe(
    order: Tensor,
    token: Tensor,
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
    """A call given by queries and keys; arguments as of ``attnmon.call.make_call``."""
    described = {name: given for name, given in locals().items() if name in CALL_FIELDS}
    found, site = _find(token)
    if found is not None:
        left, right = described.pop("window_left"), described.pop("window_right")
        window = None if left is None and right is None else (left, right)
        found.call(site, route, {**described, "window": window})


CALL_FIELDS = tuple(inspect.signature(_observe).parameters)[3:]
"""What a graph tells of a call, in the order of the operator's arguments."""
observe = torch.library.custom_op("attnmon::observe", _observe, mutates_args=("order",))


@torch.library.custom_op("attnmon::observe_logits", mutates_args=("order",))
def observe_logits(
    order: Tensor,
    token: Tensor,
    logits: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    head_dim: int,
    heads: int,
    is_cross: bool,
) -> None:
    """A call given by the softmax's input, [B, H, Lq, Lk] or with heads and sequences folded together."""
    found, site = _find(token)
    if found is not None:
        found.logits(site, SoftmaxSeen(logits, scale, head_dim, sinks), heads, is_cross, value)


@torch.library.custom_op("attnmon::observe_rows", mutates_args=("order",))
def observe_rows(
    order: Tensor,
    token: Tensor,
    route: str,
    logits: Tensor,
    positions: Tensor,
    value: Tensor,
    scale: float,
    head_dim: int,
) -> None:
    """A call given by some rows of logits [S, H, R, Lk] at query positions [R]; site -1: whichever is running."""
    found, site = _find(token)
    if found is not None:
        found.rows(site, route, logits, positions, value, scale, head_dim)


@torch.library.custom_op("attnmon::refuse", mutates_args=("order",))
def refuse(order: Tensor, token: Tensor, reason: str) -> None:
    """A call that is not measured."""
    found, site = _find(token)
    if found is not None:
        found.refusal(site, reason)


def _observe_mha(
    order: Tensor,
    token: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    v_proj_weight: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    num_heads: int,
    add_zero_attn: bool,
    is_causal: bool,
    is_self: bool,
    is_cross: bool,
    autocast: torch.dtype | None,
    hidden: Tensor | None,
) -> None:
    """``multi_head_attention_forward``, whose projections are made again when the graph runs.

    Args:
        is_self: queries and keys of the call are one tensor.
        is_cross: keys come from another sequence than queries.
        autocast: what the projections were computed in; None for the tensors' own dtype.
    """
    given = {name: passed for name, passed in locals().items() if name in _MHA_ARGUMENTS}
    found, site = _find(token)
    if found is not None:
        given.update(key=query if is_self else key, use_separate_proj_weight=in_proj_weight is None)
        found.mha(site, given, is_cross, autocast, hidden)


_MHA_NAMES = tuple(inspect.signature(_observe_mha).parameters)
_MHA_ARGUMENTS = _MHA_NAMES[2 : _MHA_NAMES.index("is_self")]  # of the function itself
MHA_TENSORS = _MHA_ARGUMENTS[: _MHA_ARGUMENTS.index("num_heads")]
"""The tensors among them, in the order of the operator's arguments."""
observe_mha = torch.library.custom_op("attnmon::observe_mha", _observe_mha, mutates_args=("order",))
OPERATORS = (observe, observe_logits, observe_rows, observe_mha, refuse)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


for _operator in OPERATORS:
    _operator.register_fake(_nothing)
# selective checkpointing asks the user's policy about each operator of a region, and some policies count them
SAC_IGNORED_OPS.update(_operator._opoverload for _operator in OPERATORS)
