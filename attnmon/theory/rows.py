"""Rows of attention weights with the vectors of their keys, which every geometric statement is evaluated on.

A row is one query's weights p over its n visible keys; x_i is key i's vector, y_i = p_i x_i. Sums and distances come
from products (x_i . v, |x_i|^2) in float64, not from [rows, keys, E] differences; rows in which that cancels are
recomputed from difference vectors. Distances from one center c are ordered by their excess
|a_i x_i - c|^2 - |c|^2 = a_i (a_i |x_i|^2 - 2 c.x_i), which keeps its digits where a_i is tiny. Source: the rows are
those of the paper (arXiv 2508.17821, section 3), the arithmetic is ours.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from attnmon.checks import check_whole
from attnmon.errors import AttnmonError
from attnmon.stats.streaming import largest

_CANCELS = 1e-6  # of min |a x - c|^2 / |c|^2: closer, the product form has fewer than nine digits
_EXACT_ELEMENTS = 1 << 22  # of [rows, n, E] differences at a time
_HIDDEN = -1.0  # below every weight


class TokenRows:
    """Weights and vectors of rows, in float64.

    Args:
        weights: float32 or float64 [..., n], >= 0, of sum 1, or less where a sink takes the rest. Those of hidden
            keys are not read.
        tokens: float [n, E], one matrix that all rows share, or [..., n, E] with the weights' leading axes.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Attributes:
        shared: all rows share one matrix of vectors.
        dtype: of the weights as given, in which results are returned.
        visible: bool [..., n], or None if all keys are visible.
        p: float64 [..., n], weights; 0 at hidden keys.
        x: float64 [n, E] or [..., n, E], vectors.
        n: float64 [...], number of visible keys.

    Raises:
        AttnmonError: the shapes do not fit, an input is no float tensor, or a visible weight or a vector is not finite.

    Source: paper, section 3, for the rows; the arithmetic is ours.
    """

    def __init__(self, weights: Tensor, tokens: Tensor, visible: Tensor | None = None) -> None:
        if not (weights.is_floating_point() and tokens.is_floating_point()):
            raise AttnmonError(f"weights and tokens must be float tensors, not {weights.dtype} and {tokens.dtype}")
        if tokens.ndim < 2 or weights.ndim < 1 or tokens.shape[-2] != weights.shape[-1]:
            raise AttnmonError(
                f"tokens must be [keys, E] or [..., keys, E] for weights [..., keys]; "
                f"got {list(tokens.shape)} for weights {list(weights.shape)}"
            )
        self.shared = tokens.ndim == 2
        if not self.shared and tokens.shape[:-2] != weights.shape[:-1]:
            raise AttnmonError(
                f"the leading axes of tokens {list(tokens.shape)} differ from those of weights {list(weights.shape)}; "
                "pass [keys, E] where all rows share their keys"
            )
        self.dtype = weights.dtype
        self.visible = visible_mask(visible, weights.shape)
        p = weights.double()
        self.p = p if self.visible is None else torch.where(self.visible, p, 0.0)
        self.x = tokens.double()
        # a NaN has no rank, and one vector that is not finite would spoil the sums of rows that do not see it
        if not (self.p.isfinite().all() and self.x.isfinite().all()):
            raise AttnmonError("weights and tokens must be finite; leave out rows with logits or vectors that are not")
        length = weights.shape[-1]
        if self.visible is None:
            self.n = torch.full(weights.shape[:-1], float(length), dtype=torch.float64, device=weights.device)
        else:
            self.n = self.visible.sum(-1, dtype=torch.float64)

    @cached_property
    def squares(self) -> Tensor:
        """|x_i|^2, float64 [n] or [..., n]."""
        return self.x.square().sum(-1)

    def combine(self, scale: Tensor) -> Tensor:
        """Sum scale_i x_i over the keys: float64 [..., n] -> float64 [..., E]."""
        return scale @ self.x if self.shared else (scale[..., None, :] @ self.x).squeeze(-2)

    def along(self, vector: Tensor) -> Tensor:
        """Multiply every x_i by a vector of its row: float64 [..., E] -> float64 [..., n]."""
        return vector @ self.x.T if self.shared else (self.x @ vector[..., None]).squeeze(-1)

    @cached_property
    def output(self) -> Tensor:
        """sum_j p_j x_j over all visible keys, float64 [..., E]."""
        return self.combine(self.p)

    @cached_property
    def along_output(self) -> Tensor:
        """x_i . sum_j p_j x_j, float64 [..., n]."""
        return self.along(self.output)

    @cached_property
    def largest_norm(self) -> Tensor:
        """max |x_i| over the visible keys, float64 [...]."""
        norms = self.squares.sqrt().expand(self.p.shape)
        return (norms if self.visible is None else torch.where(self.visible, norms, 0.0)).amax(-1)

    def offsets(
        self, scale: Tensor, center: Tensor, among: Tensor | None, along: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute how far scale_i x_i lies from the center, for every key.

        Args:
            scale: float64 [..., n].
            center: float64 [..., E].
            among: bool [..., n], the keys whose distances must keep their digits even where they are small; None: all.
            along: float64 [..., n], x_i . center, if it is known.

        Returns:
            A number that orders each row's distances exactly, and the distances themselves, both float64 [..., n].
            The entries of hidden keys mean nothing.
        """
        along = self.along(center) if along is None else along
        center_square = center.square().sum(-1)
        order = scale * (scale * self.squares - 2.0 * along)
        square = (order + center_square[..., None]).clamp_(min=0.0)
        seen = self.visible if among is None else among
        least = (square if seen is None else torch.where(seen, square, math.inf)).amin(-1)
        lengths = square.sqrt_()
        close = least < _CANCELS * center_square
        if close.any():
            self._recompute(close, scale, center, order, lengths)
        return order, lengths

    def _recompute(self, rows: Tensor, scale: Tensor, center: Tensor, order: Tensor, lengths: Tensor) -> None:
        """Overwrite the marked rows of ``order`` and ``lengths`` by distances from difference vectors."""
        block = max(1, _EXACT_ELEMENTS // max(1, self.x.shape[-1] * self.x.shape[-2]))
        picked = rows.nonzero()
        if rows.ndim == 0:  # a single row has no index
            gaps = torch.linalg.vector_norm(self.x * scale[..., None] - center, dim=-1)
            order.copy_(gaps)
            lengths.copy_(gaps)
            return
        for chunk in picked.split(block):
            at = chunk.unbind(-1)
            x = self.x if self.shared else self.x[at]
            gaps = torch.linalg.vector_norm(x * scale[at][..., None] - center[at][:, None], dim=-1)
            order[at] = gaps
            lengths[at] = gaps

    def seen(self, values: Tensor, otherwise: float = 0.0) -> Tensor:
        """Replace the values of hidden keys, [..., n]."""
        return values if self.visible is None else torch.where(self.visible, values, otherwise)

    def outside(self, selected: Tensor) -> Tensor:
        """Mark the visible keys that are not selected: bool [..., n] -> bool [..., n]."""
        return ~selected if self.visible is None else ~selected & self.visible


def visible_mask(visible: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Expand a mask to the rows.

    Args:
        visible: bool, broadcastable to ``shape``; None: all keys.
        shape: of the rows, (..., n).

    Returns:
        bool of that shape, or None for all keys.

    Raises:
        AttnmonError: it is not bool, or does not broadcast to ``shape``.

    Source: ours (definitions, section 1): a row is its visible keys.
    """
    if visible is None:
        return None
    if visible.dtype != torch.bool:
        raise AttnmonError(f"visible must be a bool tensor (True = visible), not {visible.dtype}")
    try:
        return visible.expand(shape)
    except RuntimeError:
        raise AttnmonError(f"visible {list(visible.shape)} does not broadcast to the rows {list(shape)}") from None


def ranking(rows: TokenRows, count: int) -> tuple[Tensor, Tensor]:
    """Find the ``count`` largest weights of each row, descending, and their keys; hidden keys come last.

    Of equal weights the lowest index comes first, as everywhere in attnmon, so the first N are I_N for every
    N < ``count`` (and for N = ``count`` where that is all keys).

    Args:
        rows: weights and vectors.
        count: at most the number of keys.

    Returns:
        weights, float64 [..., count], and keys, int64 [..., count].

    Source: paper, section 3, definition of I_N; the order of ties is ours.
    """
    values = rows.seen(rows.p, _HIDDEN)
    index = largest(values.detach(), count, count, _HIDDEN / 2)[1]  # its working memory does not go with autograd
    top = values.gather(-1, index)
    tied = ((top[..., 1:] == top[..., :-1]) & (top[..., 1:] > _HIDDEN / 2)).any(-1)
    if tied.any():
        ordered, stable = values[tied].sort(dim=-1, descending=True, stable=True)
        top[tied] = ordered[..., :count]
        index[tied] = stable[..., :count]
    return top.clamp(min=0.0), index


def selection(rows: TokenRows, index: Tensor, top_n: int) -> Tensor:
    """Mark I_N of each row.

    Args:
        rows: weights and vectors.
        index: int64 [..., K], the keys of ``ranking``.
        top_n: N, at most K.

    Returns:
        bool [..., n]; every visible key where the row has no more than N.

    Source: paper, section 3, definition of I_N.
    """
    chosen = torch.zeros(rows.p.shape, dtype=torch.bool, device=rows.p.device)
    chosen.scatter_(-1, index[..., :top_n], True)
    return chosen if rows.visible is None else chosen & rows.visible


def top_n_selection(rows: TokenRows, top_n: int) -> Tensor:
    """Rank the keys and mark I_N of each row.

    Args:
        rows: weights and vectors.
        top_n: N, at least 1.

    Returns:
        bool [..., n].

    Raises:
        AttnmonError: ``top_n`` is no whole number of at least 1.

    Source: paper, section 3, definition of I_N.
    """
    check_whole("top_n", top_n)
    return selection(rows, ranking(rows, min(rows.p.shape[-1], top_n + 1))[1], top_n)
