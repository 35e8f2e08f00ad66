"""The general form of a normalizer, alpha_i = F(l_i, theta) / sum_j F(l_j, theta) (paper, arXiv 2508.17821, section 2).

l are the standard scaled logits q.k / sqrt(d). Every Jacobian is with respect to l; hidden keys are no part of a row.
"""

from __future__ import annotations

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
    """A map from a row's logits to weights, which computes in float64 and answers in the dtype of the logits.

    Attributes:
        sums_to_one: the weights over the keys sum to one.
        entropy_of: what the entropy is taken of.
        source: where the definition stands.

    Source: the general form is the paper's (section 2); some subclasses do not have it.
    """

    sums_to_one: ClassVar[bool] = True
    entropy_of: ClassVar[str] = "the weights"
    source: ClassVar[str]

    @property
    @abstractmethod
    def label(self) -> str:
        """Name and parameters, for a table."""

    def weights(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Compute the weights alpha.

        Args:
            logits: float [..., n], l, finite at visible keys.
            visible: bool, broadcastable to [..., n]; None: all keys. Every row must see a key.

        Returns:
            [..., n] of the logits' dtype; 0 at hidden keys.

        Raises:
            AttnmonError: ``logits`` is no float tensor, or ``visible`` does not fit.
        """
        return self._weights(*row_of(logits, visible)).to(logits.dtype)

    def jacobian_norm(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Compute the exact spectral norm of d alpha / d l.

        Args:
            logits: float [..., n], l, finite at visible keys.
            visible: bool, broadcastable to [..., n]; None: all keys. Every row must see a key.

        Returns:
            [...] of the logits' dtype.

        Raises:
            AttnmonError: ``logits`` is no float tensor, or ``visible`` does not fit.
        """
        return self._jacobian_norm(*row_of(logits, visible)).to(logits.dtype)

    def entropy(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Compute the entropy, in nats, of what ``entropy_of`` names.

        Args:
            logits: float [..., n], l, finite at visible keys.
            visible: bool, broadcastable to [..., n]; None: all keys. Every row must see a key.

        Returns:
            [...] of the logits' dtype.

        Raises:
            AttnmonError: ``logits`` is no float tensor, or ``visible`` does not fit.
        """
        return self._entropy(*row_of(logits, visible)).to(logits.dtype)

    def max_entropy(self, n: Tensor) -> Tensor:
        """Compute the largest entropy that rows of n keys can have: float [...] -> [...]."""
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
    """F(l) / sum F(l) for any elementwise F >= 0 that autograd can follow.

    J = (diag a - a a^T) diag(F'/F) has a spectral norm of at most max |F'/F| / 2, which is ``jacobian_bound``. Weights
    are NaN where F is 0 at every key.

    Args:
        function: F, which maps float64 logits of any shape to values of the same shape.
        name: what tables call it.

    Source: paper, section 2, for the form and J; the norm and its bound are ours.
    """

    function: Callable[[Tensor], Tensor]
    name: str
    source: ClassVar[str] = "paper, section 2"

    @property
    def label(self) -> str:
        return self.name

    def jacobian_bound(self, logits: Tensor, visible: Tensor | None = None) -> Tensor:
        """Compute max |F'/F| / 2 over the visible keys of each row, an upper bound of ``jacobian_norm``. True.

        Args:
            logits: float [..., n], l, finite at visible keys.
            visible: bool, broadcastable to [..., n]; None: all keys. Every row must see a key.

        Returns:
            [...] of the logits' dtype.

        Raises:
            AttnmonError: ``logits`` is no float tensor, or ``visible`` does not fit.

        Source: ours (definitions, section 4).
        """
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
    """Convert logits to float64 and expand the mask.

    Args:
        logits: float [..., n].
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        float64 [..., n], hidden logits 0, and bool [..., n], True at visible keys.

    Raises:
        AttnmonError: ``logits`` is no float tensor, or ``visible`` does not fit.

    Source: ours (definitions, section 1): a row is its visible keys.
    """
    if not logits.is_floating_point() or logits.ndim < 1:
        raise AttnmonError(f"logits must be a float tensor [..., n], not {logits.dtype} {list(logits.shape)}")
    mask = visible_mask(visible, logits.shape)
    if mask is None:
        return logits.double(), torch.ones_like(logits, dtype=torch.bool)
    return torch.where(mask, logits.double(), 0.0), mask
