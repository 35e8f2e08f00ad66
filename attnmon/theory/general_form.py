"""The general form of a normalizer, alpha_i = F(l_i, theta) / sum_j F(l_j, theta) (paper, arXiv 2508.17821, section 2).

l are the standard scaled logits q.k / sqrt(d). Every Jacobian is with respect to l; hidden keys are no part of a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnmon.errors import AttnmonError
from attnmon.theory.lowrank import spectral_norm_low_rank
from attnmon.theory.rows import visible_mask


class Normalizer(ABC):
    """A map from a row's logits to weights. Computes in float64 and answers in the dtype of the logits.

    Attributes:
        sums_to_one: the weights over the keys sum to one.
        entropy_of: what the entropy is taken of.
        source: where the definition stands.
    """

    sums_to_one: ClassVar[bool] = True
    entropy_of: ClassVar[str] = "the weights"
    source: ClassVar[str]

    @property
    @abstractmethod
    def label(self) -> str:
        """Name and parameters, for a table."""

    def weights(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """alpha, [..., n]; 0 at hidden keys.

        Args:
            logits: l, [..., n], finite at visible keys.
            visible: bool, broadcastable to [..., n]; None: all keys. Every row must see a key.
        """
        return self._weights(*row_of(logits, visible)).to(logits.dtype)

    def jacobian_norm(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Exact spectral norm of d alpha / d l, [...]."""
        return self._jacobian_norm(*row_of(logits, visible)).to(logits.dtype)

    def entropy(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Entropy in nats of what ``entropy_of`` names, [...]."""
        return self._entropy(*row_of(logits, visible)).to(logits.dtype)

    def max_entropy(self, n: Tensor) -> Tensor:
        """Its largest value for n keys."""
        return torch.log(n)

    @abstractmethod
    def _weights(self, z: Tensor, mask: Tensor) -> Tensor: ...

    @abstractmethod
    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor: ...

    def _entropy(self, z: Tensor, mask: Tensor) -> Tensor:
        alpha = self._weights(z, mask).abs()
        entropy: Tensor = torch.special.entr(alpha / alpha.sum(-1, keepdim=True)).sum(-1)
        return entropy


@dataclass(frozen=True)
class General(Normalizer):
    """F(l) / sum F(l) for any elementwise F >= 0 that autograd can follow; J = (diag a - a a^T) diag(F'/F).

    Its spectral norm is at most max |F'/F| / 2: ``jacobian_bound``. NaN where F is 0 at every key.
    """

    function: Callable[[Tensor], Tensor]
    name: str
    source: ClassVar[str] = "paper, section 2"

    @property
    def label(self) -> str:
        return self.name

    def jacobian_bound(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """max |F'/F| / 2 over the visible keys of each row, [...]. True."""
        z, mask = row_of(logits, visible)
        value, slope = self._value_and_slope(z, mask)
        return (0.5 * torch.where(mask, (slope / value).abs(), 0.0).amax(-1)).to(logits.dtype)

    def _value_and_slope(self, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = torch.where(mask, z, 0.0).detach().requires_grad_()
            value = self.function(at)
            (slope,) = torch.autograd.grad(value.sum(), at)
        return torch.where(mask, value.detach(), 0.0), torch.where(mask, slope, 0.0)

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        value = torch.where(mask, self.function(torch.where(mask, z, 0.0)), 0.0)
        return value / value.sum(-1, keepdim=True)

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        value, slope = self._value_and_slope(z, mask)
        total = value.sum(-1, keepdim=True)
        share, slope = value / total, slope / total
        return spectral_norm_low_rank(slope, share[..., None], slope[..., None])


def row_of(logits: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits in float64, hidden ones 0, and the mask."""
    if not logits.is_floating_point() or logits.ndim < 1:
        raise AttnmonError(f"logits must be a float tensor [..., n], not {logits.dtype} {list(logits.shape)}")
    mask = visible_mask(visible, logits.shape)
    if mask is None:
        return logits.double(), torch.ones_like(logits, dtype=torch.bool)
    return torch.where(mask, logits.double(), 0.0), mask


def check_positive(name: str, value: float) -> None:
    """Raise AttnmonError unless ``value`` is positive and finite."""
    if not 0.0 < value < math.inf:
        raise AttnmonError(f"{name} must be positive and finite, not {value}")
