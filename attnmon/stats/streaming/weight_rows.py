"""Metrics of rows whose weights another normalizer than softmax made: sparsemax and the alpha-entmax family.

What is said of weights comes from the weights themselves, zeros included; logits give what is said of logits. The
Jacobian is the normalizer's own (definitions, section 4; Peters, Niculae, Martins, arXiv 1905.05702):
``J = (diag s - s s^T / sum s) / tau`` with ``s = p^(2 - alpha)`` on the support and 0 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from attnmon.stats.streaming.eigenvalue import EIGENVALUE_CANDIDATES, scaled_eigenvalue
from attnmon.stats.streaming.row_inputs import HIDDEN, RowInputs, RowOutputs
from attnmon.stats.streaming.separation import selection_geometry
from attnmon.stats.streaming.top_keys import largest, leading

_BELOW = 1e6  # how far a masked key lies below the largest logit, where the normalizer is called again
_LEAST_EXPONENT = -36.0

Normalizer = Callable[[Tensor, "float | Tensor"], Tensor]


def weight_metrics(
    inputs: RowInputs, weights: Tensor, alpha: float | Tensor, normalizer: Normalizer | None, wanted: Collection[str]
) -> RowOutputs:
    """Metrics of rows with given weights, as far as the inputs allow.

    Rows that are not finite or see nothing hold garbage.

    Args:
        inputs: finished logits ``z`` (softcap and sinks are ignored), ``perturbation`` as a = eps v / tau.
        weights: p, [S, H, R, Lk].
        alpha: of the normalizer; a number, or broadcastable to [S, H, R, Lk].
        normalizer: (logits, alpha) -> weights over the last axis, for ``jacobian_fd``; or None.
        wanted: names of metrics.
    """
    mask, n = inputs.mask, inputs.num_keys
    z, p = inputs.z, weights
    if mask is not None:
        z, p = torch.where(mask, z, HIDDEN), torch.where(mask, p, 0.0)
    values: dict[str, Tensor] = {}

    top = z.amax(-1)
    below = z - top[..., None]
    if mask is not None:
        below = torch.where(mask, below, 0.0)
    mean = below.sum(-1) / n.clamp(min=1.0)
    centered = below - mean[..., None]
    if mask is not None:
        centered = torch.where(mask, centered, 0.0)
    values["max_logit"] = top
    values["logit_std"] = torch.linalg.vector_norm(centered, dim=-1) / n.clamp(min=1.0).sqrt()
    finite = (top < math.inf) & mean.isfinite() & p.sum(-1).isfinite()
    z, p = (torch.where(finite[..., None], tensor, 0.0) for tensor in (z, p))

    values["entropy"] = torch.special.entr(p).sum(-1)
    values["entropy_norm"] = values["entropy"] / torch.log(n).clamp(min=1e-12)
    # a visible key of weight 0 comes before every hidden one
    ranked = p if mask is None else torch.where(mask, p, -1.0)
    count_top = min(p.shape[-1], inputs.top_n + 1)
    p_top, index = largest(ranked, count_top, min(inputs.top_n, count_top), -0.5)
    p_top = p_top.clamp(min=0.0)
    values["max_prob"] = p_top[..., 0]
    values["top_mass"] = p_top[..., : inputs.top_n].sum(-1)
    values["first_mass"] = _first_mass(p, inputs.first_key)
    if "jacobian" in wanted or "jacobian_max" in wanted:
        values["jacobian"] = largest_sensitivity(p, alpha) / inputs.tau
        values["jacobian_max"] = values["jacobian"]
    if inputs.perturbation is not None and normalizer is not None:
        moved = _moved(z, top, mask, inputs.perturbation, alpha, normalizer)
        values["jacobian_fd"] = (moved / inputs.fd_epsilon).to(p.dtype)
    if inputs.tokens is not None:
        values["separability"], values["distance"] = selection_geometry(
            tokens=inputs.tokens,
            inverse_length=inputs.inverse_length,
            tail=p.scatter(-1, index, 0.0),
            e_top=leading(p_top),
            index=index,
            weight=inputs.weight,
            visible=mask,
            n=n,
            total=torch.ones_like(top),
            top_n=inputs.top_n,
            masked_search=inputs.robust,
        )
    return RowOutputs({name: values[name] for name in values if name in wanted or name == "logit_std"}, finite, n)


def largest_sensitivity(p: Tensor, alpha: float | Tensor) -> Tensor:
    """lambda_max of diag s - s s^T / sum s, [...], with s = p^(2 - alpha) on the support of p.

    It is (sum s) lambda_max(diag p' - p' p'^T) with p' = s / sum s: the softmax Jacobian of other weights. In units
    of the largest s those are e = exp(d), whose order is that of p for alpha < 2 and the reverse beyond.

    Args:
        p: [..., Lk], weights of alpha-entmax.
        alpha: a number, or broadcastable to p.

    Source: Peters, Niculae, Martins (arXiv 1905.05702) for the Jacobian of alpha-entmax.
    """
    support = p > 0
    logs = torch.log(torch.where(support, p, 1.0)) * (2.0 - alpha)
    logs = torch.where(support, logs, HIDDEN)
    top = logs.amax(-1)
    d = logs - top[..., None]
    few = min(p.shape[-1], EIGENVALUE_CANDIDATES)
    d_top, index = largest(d, few, few, HIDDEN / 2)
    e = torch.exp(d.clamp(min=_LEAST_EXPONENT)) * support
    e_top = e.gather(-1, index)
    tail = e.scatter_(-1, index, 0.0)
    square = torch.linalg.vector_norm(tail, dim=-1).square()
    # the eigenvalue wants the few largest first: [K, ...]
    few_first = (e_top.movedim(-1, 0), d_top.movedim(-1, 0))
    return torch.exp(top) * scaled_eigenvalue(*few_first, tail, tail.sum(-1), square, None)


def _first_mass(p: Tensor, first_key: Tensor | None) -> Tensor:
    if first_key is None:
        return p[..., 0]
    first = first_key[:, None, :, None]
    at = first.clamp(0, p.shape[-1] - 1)
    return (p.gather(-1, at.expand(-1, p.shape[1], -1, -1)) * (at == first))[..., 0]


def _moved(
    z: Tensor, top: Tensor, mask: Tensor | None, move: Tensor, alpha: float | Tensor, normalizer: Normalizer
) -> Tensor:
    """|F(z + a) - F(z)| of each row: two calls of the normalizer and a difference that cancels, in float64.

    Unlike softmax, F has no closed form in which the difference could be taken beforehand.
    """
    exact = torch.float32 if z.device.type == "mps" else torch.float64
    z = z.to(exact)
    if mask is not None:  # far below, but not so far that a square overflows
        z = torch.where(mask, z, torch.nan_to_num(top, 0.0, 0.0, 0.0).to(exact)[..., None] - _BELOW)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(exact)
    difference = normalizer(z + move.to(exact), alpha) - normalizer(z, alpha)
    length: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return length
