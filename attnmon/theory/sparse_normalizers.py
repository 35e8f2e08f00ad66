"""Normalizers whose weights can be exactly zero: sparsemax and the alpha-entmax family, by the entmax package.

Sources: Martins, Astudillo, arXiv 1602.02068; Peters, Niculae, Martins, arXiv 1905.05702.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnmon.checks import check_number
from attnmon.errors import MissingExtra
from attnmon.theory.general_form import Normalizer
from attnmon.theory.jacobian import spectral_norm

_BELOW = 1e6  # how far a hidden key lies below the largest logit where a package without masks is called


@dataclass(frozen=True)
class Entmax(Normalizer):
    """alpha-entmax of l / T, which is sparse; alpha = 2 is sparsemax, alpha -> 1 softmax. Needs ``entmax``.

    J = (diag s - s s^T / sum s) / T with s = p^(2 - alpha) on the support, 0 elsewhere.

    Args:
        alpha: > 1.
        temperature: T, > 0, relative to the usual scale.

    Raises:
        AttnmonError: the temperature or ``alpha`` is out of range.

    Source: Peters, Niculae, Martins, arXiv 1905.05702; the norm is ours.
    """

    alpha: float = 1.5
    temperature: float = 1.0
    source: ClassVar[str] = "Peters, Niculae, Martins, arXiv 1905.05702"

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_number("alpha", self.alpha, above=1.0)

    @property
    def label(self) -> str:
        return f"{self.alpha:g}-entmax (T = {self.temperature:g})"

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        return _sparse_weights(z, mask, self.alpha, self.temperature)

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        p = self._weights(z, mask)
        s = torch.where(p > 0.0, p.clamp(min=torch.finfo(p.dtype).tiny) ** (2.0 - self.alpha), 0.0)
        total = s.sum(-1, keepdim=True)
        # J is the Jacobian of softmax at the weights s / sum s, times sum s
        return spectral_norm(s / total) * total[..., 0] / self.temperature


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """The Euclidean projection of l / T onto the simplex: 2-entmax. Needs ``entmax``.

    Its Jacobian has a spectral norm of 1/T for a support of two or more keys, 0 for one.

    Args:
        temperature: T, > 0, relative to the usual scale.

    Raises:
        AttnmonError: the temperature is out of range.

    Source: Martins, Astudillo, arXiv 1602.02068; the norm is ours.
    """

    temperature: float = 1.0
    source: ClassVar[str] = "Martins, Astudillo, arXiv 1602.02068"

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)

    @property
    def label(self) -> str:
        return f"sparsemax (T = {self.temperature:g})"

    def _weights(self, z: Tensor, mask: Tensor) -> Tensor:
        return _sparse_weights(z, mask, 2.0, self.temperature)

    def _jacobian_norm(self, z: Tensor, mask: Tensor) -> Tensor:
        support = (self._weights(z, mask) > 0.0).sum(-1)
        return torch.where(support >= 2, 1.0 / self.temperature, 0.0).to(z.dtype)


def _sparse_weights(z: Tensor, mask: Tensor, alpha: float, temperature: float) -> Tensor:
    """Compute alpha-entmax of z / T over the visible keys; the package knows no mask."""
    # relative to the largest, so that no square of a hidden key overflows
    top = torch.where(mask, z, -math.inf).amax(-1, keepdim=True)
    below = torch.where(mask, (z - top) / temperature, -_BELOW).clamp(min=-_BELOW)
    weights: Tensor = _entmax(alpha)(below)
    return torch.where(mask, weights, 0.0)


def _entmax(alpha: float) -> Callable[[Tensor], Tensor]:
    try:
        import entmax
    except ModuleNotFoundError as error:
        raise MissingExtra("entmax", "paper", "sparsemax and alpha-entmax") from error
    if alpha == 2.0:
        return lambda z: entmax.sparsemax(z, dim=-1)
    if alpha == 1.5:
        return lambda z: entmax.entmax15(z, dim=-1)
    return lambda z: entmax.entmax_bisect(z, alpha, dim=-1, n_iter=80)
