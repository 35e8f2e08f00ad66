"""Validation, and the choice of an implementation: the only file of stats that knows them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from attnmon.call import make_call
from attnmon.checks import check_choice
from attnmon.errors import AttnmonError, UnsupportedAttention
from attnmon.metrics import METRICS
from attnmon.stats.fused import host
from attnmon.stats.packing import Packing
from attnmon.stats.plan import Plan, make_plan
from attnmon.stats.settings import BACKENDS, DEFAULTS, Settings
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
    top_n: int = DEFAULTS.top_n,
    tokens: str = DEFAULTS.tokens,
    fd_epsilon: float = DEFAULTS.fd_epsilon,
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
        backend: "torch" (streaming, any device, float64 arithmetic); "triton" (fused kernels, CUDA and ROCm devices,
            float32); "auto": the kernels where they can run and take the call, else streaming.
        hidden: [B, Lk, E] hidden states, for ``tokens="hidden"``.

    Returns:
        dict from metric to a float32 tensor [H] on the query's device; NaN for a head without a valid row.

    Raises:
        AttnmonError: an argument is wrong, or a requested metric lacks what it needs, or ``backend`` cannot run here.
        UnsupportedAttention: ``backend="triton"`` and a call that the kernels do not take.

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
    # without a softcap max_logit_uncapped is max_logit; without sinks (below) sink_mass is 0
    substitutes = {}
    if metrics is not None and softcap is None and "max_logit_uncapped" in settings.metrics:
        substitutes["max_logit_uncapped"] = "max_logit"
    measured = replace(settings, metrics=tuple(dict.fromkeys((*settings.metrics, *substitutes.values()))))
    packing = Packing(measured.metrics)
    exact = torch.float32 if query.device.type == "mps" else torch.float64
    chosen = choose_backend(backend, call, measured)
    packed = measure(call, measured, make_plan(call, measured), packing, chosen, dtype=exact)
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
    """Packed statistics of ``call``, by an implementation that takes it (see ``choose_backend``).

    Args:
        call: tensors on one device; nothing of it is kept.
        settings: what to measure.
        plan: which rows.
        packing: layout of the result.
        backend: "torch" or "triton".
        dtype: of the arithmetic of "torch": float32 while training, float64 in ``attention_stats``, which has the
            time for it. "triton" always computes in float32.

    Returns:
        [columns, H], float64 (float32 where the device has no float64); merge with ``Packing.merge``.
    """
    implementation = {"torch": "streaming.measure", "triton": "fused.launch"}[backend]
    module = import_module(f"attnmon.stats.{implementation}")
    packed: Tensor = module.measure(call, settings, plan, packing, dtype)
    return packed


def resolve_backend(backend: str, device: torch.device | None = None) -> str:
    """The implementation that "auto" stands for on a device; an explicit choice is checked, never replaced.

    Args:
        backend: "auto", "torch" or "triton".
        device: where the tensors are; None: not known yet, so that "auto" is "torch" and "triton" is checked against
            what this machine has.

    Raises:
        AttnmonError: unknown name, or an implementation that cannot run here.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "triton":
        reason = host.unavailable(device)
        if reason is not None:
            raise AttnmonError(f"backend='triton' cannot run: {reason}. Use backend='auto' or 'torch'")
        return "triton"
    on_gpu = backend == "auto" and device is not None and device.type == "cuda"
    return "triton" if on_gpu and host.unavailable(device) is None else "torch"


def choose_backend(backend: str, call: AttentionCall, settings: Settings) -> str:
    """The implementation that measures this call, "torch" or "triton"; no work on the device.

    Args:
        backend: "auto", "torch" or "triton".
        call: the call; its kinds and sizes decide, never its values.
        settings: what to measure.

    Raises:
        AttnmonError: unknown name, or an implementation that cannot run here.
        UnsupportedAttention: an explicit "triton" and a call that the kernels do not take.
    """
    source = call.query if call.query is not None else call.logits
    assert source is not None
    chosen = resolve_backend(backend, source.device)
    reason = host.unsupported(call, settings) if chosen == "triton" else None
    if reason is None:
        return chosen
    if backend == "triton":
        raise UnsupportedAttention(f"backend='triton' does not take {reason}; backend='auto' measures it with torch")
    return "torch"


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
    return replace(settings, metrics=tuple(name for name in settings.metrics if has[METRICS[name].needs]))
