"""g(T, eps) and the exact norm of the softmax Jacobian of the same rows at many temperatures: experiment 5.

The order of a row's logits, their distances from the largest and the direction of the step do not depend on T, so they
are found once. What remains for each T is float32 arithmetic: the solver of the live metric ``jacobian``, the small
step of ``jacobian_fd``, and ``theory.jacobian.large_move``. ``attnmon.theory.jacobian`` is the definition; the tests
hold this file to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmon.stats.streaming import (
    EIGENVALUE_CANDIDATES,
    EXPM1_LIMIT,
    HIDDEN,
    largest,
    leading,
    scaled_eigenvalue,
    small_step,
)
from attnmon.theory.jacobian import large_move

_BLOCK = 512  # rows at a time: fewer waste less above the diagonal, but make threads wait for the interpreter
_LEAST_EXPONENT = -86.0  # above float32's least normal number: exp is many times slower from there on


def sensitivities(
    logits: Tensor, directions: Tensor, visible: Tensor, temperatures: Sequence[float], epsilons: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Compute ``finite_difference`` and ``spectral_norm`` of causal rows at many temperatures.

    Args:
        logits: float32 [R, R], l, standard scaled logits at temperature 1; finite at visible keys.
        directions: float32 [R, R]; scaled here to unit length over each row's visible keys.
        visible: bool [R, R], nothing above the diagonal; a row without a key is NaN.
        temperatures: T, each > 0.
        epsilons: eps, each > 0.

    Returns:
        g, float32 [temperatures, epsilons, R], and the norm, float32 [temperatures, R], to about five digits; a
        change of the weights below 1e-19 may count as 0.

    Source: paper, Algorithm 5, for g; the exact norm is ours.
    """
    count = logits.shape[0]
    g = logits.new_empty(len(temperatures), len(epsilons), count)
    norm = logits.new_empty(len(temperatures), count)
    for first in range(0, count, _BLOCK):
        block, reach = slice(first, min(first + _BLOCK, count)), min(first + _BLOCK, count)
        seen = visible[block, :reach]
        rows = _Rows(logits[block, :reach], directions[block, :reach], seen)
        for t, temperature in enumerate(temperatures):
            norm[t, block] = rows.cool(temperature)
            for e, epsilon in enumerate(epsilons):
                g[t, e, block] = rows.step(epsilon)
    return g, norm


class _Rows:
    """A block of rows, at one temperature at a time."""

    def __init__(self, logits: Tensor, directions: Tensor, visible: Tensor) -> None:
        z = logits.masked_fill(~visible, HIDDEN)
        few = min(z.shape[-1], EIGENVALUE_CANDIDATES)
        top, self._index = largest(z, few, few, HIDDEN / 2)
        self._largest = self._index[..., :1]
        self._below = z - top[..., :1]
        self._top_below = leading(top - top[..., :1])
        v = directions.masked_fill(~visible, 0.0)
        v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        # relative to that of the largest logit; hidden keys have no weight, so what moves them is nothing
        self._v = v - v.gather(-1, self._largest)

    def cool(self, temperature: float) -> Tensor:
        """Set T and compute the exact norm, [R]."""
        self._temperature = temperature
        self._d = self._below / temperature
        d_top = self._top_below / temperature
        self._e_top = torch.exp(d_top)
        # e of all keys but the largest, then of all but the few largest
        self._rest = self._d.clamp(min=_LEAST_EXPONENT).exp_().scatter_(-1, self._largest, 0.0)
        self._tail = self._rest.scatter(-1, self._index, 0.0)
        self._tail_sum = self._tail.sum(-1)
        self._tail_square = torch.linalg.vector_norm(self._tail, dim=-1).square()
        self._others = self._e_top[1:].sum(0) + self._tail_sum
        root = scaled_eigenvalue(self._e_top, d_top, self._tail, self._tail_sum, self._tail_square, None)
        return root / (1.0 + self._others) / temperature

    def step(self, epsilon: float) -> Tensor:
        """Compute g(T, eps), [R]."""
        length = epsilon / self._temperature
        move = self._v * length
        if length > EXPM1_LIMIT:
            return large_move(self._d, move, self._largest, self._rest, self._others) / epsilon
        x = move.expm1_()
        moved = small_step(x, self._tail, self._index, self._e_top, self._tail_sum, self._tail_square, None)
        return moved / epsilon
