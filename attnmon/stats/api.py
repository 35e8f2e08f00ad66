"""Validation, and the choice of an implementation: the only file of stats that knows them all."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from attnmon.errors import AttnmonError, UnsupportedAttention
from attnmon.metrics import METRICS
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan, make_plan
from attnmon.stats.settings import BACKENDS, Settings
from attnmon.types import AttentionCall


def attention_stats(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: int | None = None,
    sequences: int | None = None,
    top_n: int = 16,
    tokens: str = "value",
    fd_epsilon: float = 0.1,
    metrics: Iterable[str] | str | None = None,
    backend: str = "auto",
    hidden: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics of one attention call, one number per head and metric.

    Args:
        query: [B, H, Lq, D], any float dtype, any strides.
        key: [B, Hkv, Lk, D]; H a multiple of Hkv.
        value: [B, Hkv, Lk, Dv]; without it (and without ``hidden``) separability and distance are left out.
        attn_mask: broadcastable to [B, H, Lq, Lk]; bool (True = visible) or float (added to the logits; at or
            below ``finfo(dtype).min / 2``, or -1e8, it masks).
        is_causal: query i sees keys j <= i, aligned top-left as in PyTorch's SDPA. May be combined with masks.
        scale: multiplies q.k; 1/sqrt(D) if None.
        softcap: c in c * tanh(scale * q.k / c), before masks.
        sinks: [H] logits of a key-less column in the denominator.
        window: W: query i sees keys with |i - j| < W (with ``is_causal`` the last W, its own included); or
            (left, right): i - left <= j <= i + right, None or -1 for no limit.
        key_padding_mask: [B, Lk]; bool, True = padding (as in nn.MultiheadAttention), or float, added.
        cu_seqlens: int [documents + 1], boundaries of sequences packed into B = 1 (Lq == Lk); a row sees its
            own document only.
        rows: sampled query positions per sequence; None for every row.
        sequences: sampled sequences; None for all.
        top_n: N, size of the selected set.
        tokens: "value" (unit length), "value_raw", or "hidden" (unit length; needs ``hidden``).
        fd_epsilon: step of ``jacobian_fd``, in units of standard scaled logits.
        metrics: names from ``attnmon.metrics``; None for all that the arguments allow.
        backend: "auto", "torch" or "triton".
        hidden: [B, Lk, E] hidden states, for ``tokens="hidden"``.

    Returns:
        dict from metric to a float32 tensor [H] on the query's device; NaN for a head without a valid row.

    Raises:
        AttnmonError: an argument is wrong, or a requested metric lacks what it needs.

    Example:
        >>> q = k = v = torch.zeros(1, 2, 8, 4)
        >>> attention_stats(q, k, v, metrics=["entropy_norm"])["entropy_norm"]
        tensor([1., 1.])

    Source: definitions of "Limitations of Normalization in Attention Mechanism" (arXiv 2508.17821), with the
    corrections listed in ``attnmon.metrics``.
    """
    settings = Settings.create(
        metrics=metrics, rows=rows, sequences=sequences, top_n=top_n, tokens=tokens, fd_epsilon=fd_epsilon
    )
    call = make_call(
        query,
        key,
        value,
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        hidden=hidden,
    )
    settings = _allowed(settings, call, explicit=metrics is not None)
    # without a softcap or a sink these two are known from others
    substitutes = {}
    if metrics is not None and softcap is None and "max_logit_uncapped" in settings.metrics:
        substitutes["max_logit_uncapped"] = "max_logit"
    packing = Packing(tuple(dict.fromkeys((*settings.metrics, *substitutes.values()))))
    exact = torch.float32 if query.device.type == "mps" else torch.float64
    packed = measure(
        call, settings, make_plan(call, settings), packing, resolve_backend(backend, query.device), dtype=exact
    )
    matrix = packed.double().cpu().numpy()
    found = packing.values(matrix)
    found.update({name: found[other] for name, other in substitutes.items()})
    if sinks is None and "sink_mass" in found:
        found["sink_mass"] = np.where(packing.rows(matrix) > 0, np.float32(0.0), np.float32(np.nan))
    return {name: torch.from_numpy(found[name]).to(query.device) for name in settings.metrics}


def measure(
    call: AttentionCall,
    settings: Settings,
    plan: Plan,
    packing: Packing,
    backend: str,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Packed statistics [columns, H] of ``call`` by the named implementation ("torch" or "triton").

    While training the arithmetic is float32; ``attention_stats`` has the time for float64.
    """
    implementation = {"torch": "streaming", "triton": "triton_kernel"}[backend]
    module = import_module(f"attnmon.stats.{implementation}")
    packed: Tensor = module.measure(call, settings, plan, packing, dtype)
    return packed


def resolve_backend(backend: str, device: torch.device | None = None) -> str:
    """The implementation that "auto" stands for; an explicit choice is checked, never replaced.

    Raises:
        AttnmonError: unknown name, or an implementation that cannot run here.
    """
    del device
    if backend not in BACKENDS:
        raise AttnmonError(f"backend must be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
    if backend == "triton":
        raise AttnmonError("backend='triton' is not available in this version; use backend='auto' or 'torch'")
    return "torch"


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    hidden: Tensor | None = None,
    is_cross: bool = False,
) -> AttentionCall:
    """Validate the arguments of a call and bring them to one form.

    Raises:
        AttnmonError: shapes, dtypes or combinations that mean nothing.
        UnsupportedAttention: meaningful, but not measured.
    """
    _check_floats(query=query, key=key, value=value)
    batch, heads, length, dim = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    if key.shape[0] != batch or key.shape[3] != dim:
        raise AttnmonError(f"key must be [{batch}, Hkv, Lk, {dim}] to match query; got {list(key.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise AttnmonError(f"query heads must be a multiple of key heads; got {heads} and {kv_heads}")
    if value is not None and tuple(value.shape[:3]) != tuple(key.shape[:3]):
        raise AttnmonError(f"value must be {list(key.shape[:3])} + [Dv] to match key; got {list(value.shape)}")
    if num_keys == 0 or length == 0 or batch == 0:
        raise AttnmonError(f"query and key must not be empty; got {list(query.shape)} and {list(key.shape)}")
    if scale is None:
        scale = dim**-0.5
    if not scale > 0:
        raise AttnmonError(f"scale must be a positive number; got {scale!r}")
    if softcap is not None and not softcap > 0:
        raise AttnmonError(f"softcap must be a positive number or None; got {softcap!r}")
    if sinks is not None:
        if sinks.numel() != heads:
            raise AttnmonError(f"sinks must hold one logit per query head, [{heads}]; got {list(sinks.shape)}")
        sinks = sinks.detach().reshape(heads)
    if attn_mask is not None:
        attn_mask = _mask_4d(attn_mask, (batch, heads, length, num_keys))
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, num_keys):
        raise AttnmonError(f"key_padding_mask must be [{batch}, {num_keys}]; got {list(key_padding_mask.shape)}")
    if hidden is not None and (hidden.dim() != 3 or tuple(hidden.shape[:2]) != (batch, num_keys)):
        raise AttnmonError(f"hidden must be [{batch}, {num_keys}, E]; got {list(hidden.shape)}")
    if cu_seqlens is not None:
        if batch != 1 or length != num_keys:
            raise AttnmonError(
                f"cu_seqlens describes sequences packed into one (B = 1, Lq == Lk); got B = {batch}, "
                f"Lq = {length}, Lk = {num_keys}"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype.is_floating_point:
            raise AttnmonError(f"cu_seqlens must be int [documents + 1]; got {list(cu_seqlens.shape)}")
        if key_padding_mask is not None:
            raise UnsupportedAttention("cu_seqlens and key_padding_mask together; packed sequences have no padding")
    return AttentionCall(
        query=query.detach(),
        key=key.detach(),
        value=None if value is None else value.detach(),
        scale=float(scale),
        head_dim=dim,
        attn_mask=attn_mask,
        is_causal=bool(is_causal),
        causal_offset=causal_offset,
        softcap=softcap,
        sinks=sinks,
        window=normalise_window(window),
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        hidden=None if hidden is None else hidden.detach(),
        is_cross=is_cross,
    )


def normalise_window(
    window: int | tuple[int | None, int | None] | None,
) -> tuple[int | None, int | None] | None:
    """(left, right) as lookback and lookahead, None for no limit; None for no window at all."""
    if window is None:
        return None
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise AttnmonError(f"window must be at least 1 (the query's own key); got {window}")
        return (window - 1, window - 1)
    try:
        left, right = window  # type: ignore[misc]
    except (TypeError, ValueError):
        raise AttnmonError(f"window must be an int or a pair (left, right); got {window!r}") from None
    sides = tuple(None if side is None or side < 0 else int(side) for side in (left, right))
    return None if sides == (None, None) else (sides[0], sides[1])


def _check_floats(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None and name == "value":
            continue
        if not isinstance(tensor, Tensor):
            raise AttnmonError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise AttnmonError(f"{name} must have 4 axes [B, heads, L, D]; got {list(tensor.shape)}")
        if not tensor.dtype.is_floating_point:
            raise AttnmonError(f"{name} must be of a float dtype; got {tensor.dtype}")


def _mask_4d(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise AttnmonError(f"attn_mask must be bool (True = visible) or float (added); got {mask.dtype}")
    if mask.dim() > 4:
        raise AttnmonError(f"attn_mask must broadcast to {list(shape)}; got {list(mask.shape)}")
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    if any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
        raise AttnmonError(f"attn_mask must broadcast to {list(shape)}; got {list(mask.shape)}")
    # an expanded axis says the same of every index; the cheaper paths look at sizes
    for axis, stride in enumerate(mask.stride()[:3]):
        if stride == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask if mask.shape[3] == shape[3] else mask.expand(-1, -1, -1, shape[3])


def _allowed(settings: Settings, call: AttentionCall, *, explicit: bool) -> Settings:
    """Drop metrics that the call has nothing for; complain if one of those was asked for by name."""
    has_tokens = call.hidden is not None if settings.tokens == "hidden" else call.value is not None
    if explicit and settings.needs_tokens and not has_tokens:
        needing = [name for name in settings.metrics if METRICS[name].needs == "value"]
        what = "hidden=[B, Lk, E]" if settings.tokens == "hidden" else "value=[B, Hkv, Lk, Dv]"
        raise AttnmonError(f"{', '.join(needing)} with tokens={settings.tokens!r} need {what}; pass it or drop them")
    if explicit:
        return settings
    has = {"": True, "value": has_tokens, "sinks": call.sinks is not None, "softcap": call.softcap is not None}
    metrics = tuple(name for name in settings.metrics if has[METRICS[name].needs])
    return Settings(
        metrics, settings.rows, settings.sequences, settings.top_n, settings.tokens, settings.fd_epsilon
    )
