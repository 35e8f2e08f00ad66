"""Separability and distance of a block of rows.

Source: paper, section 3.

Everything is scaled by Z: s' = sum over the selection of e_j x_j and D'_i = |e_i x_i - s'| = Z |p_i x_i - s|.
Distances are compared through their excess D'^2 - |s'|^2 = e_i (e_i |x_i|^2 - 2 s'.x_i): small weights leave D'
itself equal to |s'| within float32, while the excess keeps all its digits. It needs one matrix product. Only
where an outsider lies almost at s' does the excess cancel; such a row is recomputed vector by vector.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmon.stats.streaming.products import gather_vectors, lengths_of, scores, weighted_vectors
from attnmon.stats.streaming.scratch import scratch
from attnmon.stats.streaming.top_keys import leading

_CANCELS = 1e-2  # of min D'^2 / |s'|^2; float32 then still leaves D' five digits
_EXACT_ELEMENTS = 1 << 22  # of [rows, Lk, E] differences at a time


def selection_geometry(
    *,
    tokens: Tensor,
    inverse_length: Tensor | None,
    tail: Tensor,
    e_top: Tensor,
    index: Tensor,
    weight: Tensor | None,
    visible: Tensor | None,
    n: Tensor,
    total: Tensor,
    top_n: int,
    masked_search: bool,
) -> tuple[Tensor, Tensor]:
    """N_s / N and d~ of each row.

    Args, float32 unless said:
        tokens: [S, G, Lk, E]; G divides H (or is 1).
        inverse_length: [S, G, Lk]; x = inverse_length * tokens; NaN where a token is not finite; None: x = tokens.
        tail: [S, H, R, Lk] e of keys beyond the K largest, 0 at those and at masked keys.
        e_top, index: [K, S, H, R] the K largest e, and [S, H, R, K] their keys (int64); the first N are the selection.
        weight, visible: visibility as float and bool, broadcastable to [S, H, R, Lk]; None = all.
        n: visible keys, broadcastable to [S, H, R].
        total: Z, [S, H, R].
        top_n: N.
        masked_search: look for the nearest outsider with the mask (on devices where asking costs a wait, or
            with garbage in masked keys) rather than only in rows that turn out to need it.

    Returns:
        separability and distance, [S, H, R]; separability is garbage where n <= N, distance 0 there.
        NaN where a visible key's x is not finite.
    """
    num_s, num_h, num_r, length = tail.shape
    few = index.shape[-1]
    if few <= top_n:  # no row can have n > N
        return torch.ones_like(total), torch.zeros_like(total)
    group = num_h // tokens.shape[1]

    def of_heads(numbers: Tensor) -> Tensor:
        """[S, G, Lk] -> [S, H, 1, Lk]."""
        return (numbers if group == 1 else numbers.repeat_interleave(group, 1))[:, :, None]

    def of_largest(numbers: Tensor) -> Tensor:
        """[S, H, R or 1, Lk] -> [K, S, H, R]."""
        return leading(numbers.expand(-1, -1, num_r, -1).gather(-1, index))

    bad_key = None
    if masked_search:
        bad_key = ~lengths_of(tokens).isfinite() if inverse_length is None else inverse_length.isnan()
        tokens = tokens.masked_fill(bad_key[..., None], 0.0)
        if inverse_length is not None:
            inverse_length = inverse_length.nan_to_num(0.0, 0.0, 0.0)
    # x = factor * tokens and |x|^2 = square, each [S, H, 1, Lk], or None for 1
    factor = square = None
    if inverse_length is None:
        square = of_heads(lengths_of(tokens).square())
    else:
        factor = of_heads(inverse_length)
        if masked_search or float(inverse_length.amin()) == 0.0:  # zero vectors
            square = (factor > 0).to(tail.dtype)

    # s' = sum of e x over the selection
    factor_top = None if factor is None else of_largest(factor)
    weights_top = e_top if factor_top is None else e_top * factor_top
    selected_weights = weights_top[:top_n].movedim(0, -1)
    s = weighted_vectors(tokens, index[..., :top_n], selected_weights, group)  # [S, H, R, E]
    s_square = torch.linalg.vector_norm(s, dim=-1).square()

    product = scratch("work", tail.shape, tail)
    twice = (s * -2.0).view(num_s, num_h // group, group * num_r, -1)
    scores(twice, tokens, out=product.view(*twice.shape[:3], length))  # -2 s'.tokens
    if factor is not None:
        product *= factor  # -2 s'.x
    # excess D'^2 - |s'|^2 and D' of the K largest, [K, S, H, R]
    if masked_search:
        # no row can be looked at again later: subtract vector by vector at once
        weighted = gather_vectors(tokens, index, group).mul_(weights_top.movedim(0, -1)[..., None])
        from_s = weighted - s[..., None, :]
        near = leading(torch.linalg.vector_norm(from_s, dim=-1))
        near_excess = leading((weighted * from_s.sub_(s[..., None, :])).sum(-1))
    else:
        near_excess = of_largest(product)
        near_excess = near_excess.add_(e_top) if square is None else near_excess.addcmul_(e_top, of_largest(square))
        near_excess *= e_top
        near = (near_excess + s_square).clamp_(min=0.0).sqrt_()
    pull = product.add_(tail) if square is None else product.addcmul_(tail, square)
    excess = pull.mul_(tail)  # 0 at the K largest and at masked keys

    has_tail = n > few
    if masked_search:
        least = _least(excess, index, visible)
    else:
        least = excess.amin(-1)
        # 0 is the least only if every outsider has a positive excess: then the zeros stood in its way
        hidden = has_tail & (least >= 0.0)
        if hidden.any():
            of_rows = None if visible is None else visible.expand_as(excess)[hidden]
            least[hidden] = _least(excess[hidden], index[hidden], of_rows)
    far = excess.add_(s_square[..., None]).clamp_(min=0.0).sqrt_()
    if weight is not None:
        far *= weight

    ranks = torch.arange(top_n, few, device=tail.device)[:, None, None, None]
    outside = ranks < n  # those of the K largest that are not selected
    radius = torch.where(outside, near_excess[top_n:], math.inf).amin(0)  # as an excess
    radius = torch.where(has_tail, radius.minimum(least), radius)
    inside = (near_excess[:top_n] < radius).sum(0, dtype=tail.dtype)
    # the K largest sit in the sum of all with e = 0, each as exactly |s'|
    distance = far.sum(-1) - n.clamp(max=few) * s_square.sqrt() + (near[top_n:] * outside).sum(0)
    if not masked_search:
        cancels = (n > top_n) & (radius < (_CANCELS - 1.0) * s_square)
        if cancels.any():
            _recompute(cancels, tokens, factor, tail, e_top, index, visible, s, inside, distance, top_n)
    distance = torch.where(n > top_n, distance, 0.0).clamp_(min=0.0)
    separability = torch.ones_like(inside) if top_n == 1 else inside / top_n
    if bad_key is not None:
        seen = of_heads(bad_key)
        broken = (seen if visible is None else seen & visible).any(-1)
        separability = torch.where(broken, math.nan, separability)
        distance = torch.where(broken, math.nan, distance)
    return separability, distance / total


def _least(excess: Tensor, index: Tensor, visible: Tensor | None) -> Tensor:
    """Least excess of the visible keys that are not among the K largest; inf if there is none."""
    outside = torch.ones_like(excess, dtype=torch.bool).scatter_(-1, index, False)
    if visible is not None:
        outside &= visible
    return torch.where(outside, excess, math.inf).amin(-1)


def _recompute(
    rows: Tensor,
    tokens: Tensor,
    factor: Tensor | None,
    tail: Tensor,
    e_top: Tensor,
    index: Tensor,
    visible: Tensor | None,
    s: Tensor,
    inside: Tensor,
    distance: Tensor,
    top_n: int,
) -> None:
    """Overwrite ``inside`` (N_s) and ``distance`` of the marked rows, from difference vectors."""
    group = tail.shape[1] // tokens.shape[1]
    block = max(1, _EXACT_ELEMENTS // (tail.shape[-1] * tokens.shape[-1]))
    for chunk in rows.nonzero().split(block):
        at = chunk.unbind(-1)
        weights = tail[at].scatter_(-1, index[at], e_top.movedim(0, -1)[at])
        if factor is not None:
            weights *= factor[at[0], at[1], 0]
        x = tokens[at[0], at[1] // group]  # [rows, Lk, E]
        gaps = torch.linalg.vector_norm(x * weights[..., None] - s[at][:, None], dim=-1)
        selected = index[at][:, :top_n]
        outside = torch.ones_like(gaps, dtype=torch.bool)
        if visible is not None:
            outside = visible.expand_as(tail)[at].clone()
        outside.scatter_(-1, selected, False)
        radius = torch.where(outside, gaps, math.inf).amin(-1, keepdim=True)
        inside[at] = (gaps.gather(-1, selected) < radius).sum(-1, dtype=tail.dtype)
        distance[at] = torch.where(outside, gaps, 0.0).sum(-1)
