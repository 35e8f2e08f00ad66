"""What the arithmetic of a block of rows takes, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN = -1e30
"""Logit of a masked key: finite, so that 0 * HIDDEN is 0 and not NaN."""


@dataclass(frozen=True, slots=True)
class Visible:
    """Which keys rows see; every tensor broadcasts to [S, H, R, K].

    Attributes:
        mask: bool, None if all keys are visible.
        weight: ``mask`` as float32.
        shift: float32 to add to logits: the bias, and HIDDEN at masked keys.
        count: n, float32 [S, 1 or H, R], or the number of keys.
    """

    mask: Tensor | None
    weight: Tensor | None
    shift: Tensor
    count: Tensor | int

    @classmethod
    def of(cls, mask: Tensor | None, bias: Tensor | None, num_keys: int, dtype: torch.dtype) -> Visible:
        """Work out the attributes from a mask, a bias, or both.

        Args:
            mask: bool, broadcastable to [S, H, R, K], or None if all keys are visible; then there is a bias.
            bias: broadcastable to [S, H, R, K], added to logits, or None.
            num_keys: K.
            dtype: of the arithmetic.
        """
        if mask is None:
            assert bias is not None
            return cls(None, None, bias.to(dtype), num_keys)
        weight = mask.to(dtype)
        shift = (weight - 1.0) * -HIDDEN
        if bias is not None:
            shift = torch.where(mask, bias.to(dtype), HIDDEN)
        return cls(mask, weight, shift, weight.sum(-1))


@dataclass(frozen=True, slots=True)
class RowInputs:
    """A block of rows.

    Attributes:
        z: float32 [S, H, R, Lk], scale * q.k (or finished logits, then ``softcap`` is None and masked
            entries lie at or above HIDDEN but far below any logit); overwritten.
        visible: None if every row sees every key.
        tau: temperature relative to 1/sqrt(D).
        softcap: c, or None.
        sinks: float32 [H] or None.
        tokens: float32 [S, Hkv or 1, Lk, E], or None.
        inverse_length: float32 [S, Hkv or 1, Lk], what tokens are multiplied by to give x; None for 1.
        perturbation: a = eps v / tau, float32 [S, 1 or H, R, Lk], 0 at masked keys, or expm1 of it; or None.
        perturbation_is_expm1: ``perturbation`` is expm1(a); so it is wherever eps / tau is at most ``EXPM1_LIMIT``.
        fd_epsilon: eps.
        first_key: int64 [S, R], perhaps out of range (then no row sees it), or None for 0.
        top_n: N.
        robust: garbage (NaN, infinities) in masked keys is kept away from rows that do not see them, at the price of
            a few passes more.
    """

    z: Tensor
    visible: Visible | None
    tau: float
    softcap: float | None
    sinks: Tensor | None
    tokens: Tensor | None
    inverse_length: Tensor | None
    perturbation: Tensor | None
    perturbation_is_expm1: bool
    fd_epsilon: float
    first_key: Tensor | None
    top_n: int
    robust: bool

    @property
    def mask(self) -> Tensor | None:
        """``visible.mask``, or None if all keys are visible."""
        return None if self.visible is None else self.visible.mask

    @property
    def weight(self) -> Tensor | None:
        """``visible.weight``, or None if all keys are visible."""
        return None if self.visible is None else self.visible.weight

    @property
    def num_keys(self) -> Tensor:
        """n, [S or 1, H or 1, R or 1]."""
        count = self.z.shape[-1] if self.visible is None else self.visible.count
        return count if isinstance(count, Tensor) else self.z.new_full((1, 1, 1), float(count))


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """Results per row.

    Attributes:
        values: metric -> [S, H, R].
        finite: bool [S, H, R], whether every visible logit was finite.
        num_keys: n, broadcastable to [S, H, R].
    """

    values: dict[str, Tensor]
    finite: Tensor
    num_keys: Tensor
