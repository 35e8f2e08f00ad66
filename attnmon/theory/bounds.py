"""Lemma 1 of the paper (arXiv 2508.17821, section 3): how far softmax weights and entropy can be from uniform. True.

With rho = max z - min z over the n visible keys of a row (a learned sink is not covered):

    1 / (1 + (n - 1) e^rho)  <=  p_i  <=  1 / (1 + (n - 1) e^-rho),      ln n - rho  <=  H  <=  ln n.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmon.theory.rows import visible_mask


def weight_bounds(logits: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bound every softmax weight of a row from below and above. True.

    Args:
        logits: float [..., n], z of the keys as the softmax reads them (a temperature is already in them).
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        low and high, [...] of the logits' dtype: every visible p_i lies in [low, high]. Both are 1 for n = 1, NaN
        for a row without visible keys.

    Raises:
        AttnmonError: ``visible`` is not bool, or does not fit.

    Source: paper, Lemma 1.
    """
    spread, n = _spread(logits, visible)
    # e^rho may overflow: then the lower bound is 0, as it is in exact arithmetic to every digit
    low = 1.0 / (1.0 + (n - 1.0) * torch.exp(spread))
    high = 1.0 / (1.0 + (n - 1.0) * torch.exp(-spread))
    low = torch.where(n == 1.0, torch.ones_like(low), low)
    return low.to(logits.dtype), high.to(logits.dtype)


def entropy_bounds(logits: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bound a row's softmax entropy, in nats, from below and above. True.

    Args:
        logits: float [..., n], z of the keys as the softmax reads them (a temperature is already in them).
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        max(0, ln n - rho) and ln n, [...] of the logits' dtype; NaN for a row without visible keys.

    Raises:
        AttnmonError: ``visible`` is not bool, or does not fit.

    Source: paper, Lemma 1.
    """
    spread, n = _spread(logits, visible)
    high = torch.log(n)
    return (high - spread).clamp(min=0.0).to(logits.dtype), high.to(logits.dtype)


def _spread(logits: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute rho and n of each row, float64 [...]; NaN for a row without visible keys."""
    z = logits.double()
    mask = visible_mask(visible, logits.shape)
    if mask is None:
        return z.amax(-1) - z.amin(-1), torch.full(z.shape[:-1], float(z.shape[-1]), dtype=z.dtype, device=z.device)
    n = mask.sum(-1, dtype=torch.float64)
    spread = torch.where(mask, z, -math.inf).amax(-1) - torch.where(mask, z, math.inf).amin(-1)
    none = n == 0
    return torch.where(none, math.nan, spread), torch.where(none, math.nan, n)
