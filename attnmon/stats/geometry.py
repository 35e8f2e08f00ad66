"""Separability and distance of a block of rows (paper, section 3).

Everything is scaled by Z: s' = sum over the selection of e_j x_j and D'_i = |e_i x_i - s'| = Z |p_i x_i - s|.
Distances are compared through their excess D'^2 - |s'|^2 = e_i (e_i |x_i|^2 - 2 s'.x_i): small weights leave D'
itself equal to |s'| within float32, while the excess keeps all its digits. It needs one matrix product. Only
where an outsider lies almost at s' does the excess cancel; such a row is recomputed vector by vector.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmon.stats.products import gather_vectors, scores

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
        inverse_length: [S, G, Lk]; x = inverse_length * tokens; None: x = tokens.
        tail: [S, H, R, Lk] e of keys beyond the K largest, 0 at those and at masked keys.
        e_top, index: [S, H, R, K] the K largest e and their keys (int64); the first N are the selection.
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
    groups, width = tokens.shape[1], tokens.shape[3]
    if index.shape[-1] <= top_n:  # no row can have n > N
        return torch.ones_like(total), torch.zeros_like(total)
    broken = None
    if masked_search:
        bad_key = ~torch.linalg.vector_norm(tokens, dim=-1).isfinite()  # [S, G, Lk]
        tokens = tokens.masked_fill(bad_key[..., None], 0.0)
        if inverse_length is not None:
            inverse_length = inverse_length.nan_to_num(0.0, 0.0, 0.0)
        bad_row = bad_key.repeat_interleave(num_h // groups, 1)[:, :, None]
        broken = (bad_row if visible is None else bad_row & visible).any(-1)

    group = num_h // groups
    factor = e_top
    if inverse_length is not None:
        lengths = inverse_length.repeat_interleave(group, 1)[:, :, None].expand(-1, -1, num_r, -1)
        factor = factor * lengths.gather(-1, index)
    # s' = sum of e x over the selection
    chosen = gather_vectors(tokens, index if masked_search else index[..., :top_n], group)  # [S, H, R, N or K, E]
    s = (factor[..., None, :top_n] @ chosen[..., :top_n, :]).squeeze(-2)
    s_square = s.square().sum(-1)

    product = scores((s * -2.0).view(num_s, groups, -1, width), tokens)
    product = product.view(num_s, num_h, num_r, length)  # -2 s'.tokens
    if inverse_length is None:
        squares = torch.linalg.vector_norm(tokens, dim=-1).square().repeat_interleave(group, 1)[:, :, None]
        pull = product.addcmul_(tail, squares) if masked_search else torch.addcmul(product, tail, squares)
    elif masked_search or bool((inverse_length == 0).any()):  # zero vectors: |x|^2 is 0 and not 1
        squares = (inverse_length > 0).to(tail.dtype).repeat_interleave(group, 1)[:, :, None]
        product = product.mul_(lengths)
        pull = torch.addcmul(product, tail, squares)
    else:
        squares = None
        product = product.mul_(lengths)  # -2 s'.x
        pull = tail + product
    excess = pull.mul_(tail)  # 0 at the K largest and at masked keys
    if masked_search:
        # no row can be looked at again later: subtract vector by vector at once
        weighted = chosen.mul_(factor[..., None])
        from_s = weighted - s[..., None, :]
        near = torch.linalg.vector_norm(from_s, dim=-1)  # D' of the K largest
        near_excess = (weighted * from_s.sub_(s[..., None, :])).sum(-1)
    else:
        near_square = e_top if squares is None else e_top * squares.expand_as(tail).gather(-1, index)
        near_excess = (near_square + product.gather(-1, index)) * e_top
        near = (near_excess + s_square[..., None]).clamp_(min=0.0).sqrt_()

    ranks = torch.arange(index.shape[-1], device=index.device)
    outside_near = ((ranks >= top_n) & (ranks < n[..., None])).expand_as(near)
    radius = torch.where(outside_near, near_excess, math.inf).amin(-1)  # as an excess
    has_tail = n > index.shape[-1]
    if masked_search:
        radius = torch.where(has_tail, radius.minimum(_least(excess, index, visible)), radius)
    else:
        least = excess.amin(-1)
        radius = torch.where(has_tail, radius.minimum(least), radius)
        # 0 is the least only if every outsider has a positive excess: then the zeros stood in its way
        hidden = has_tail & (least >= 0.0)
        if hidden.any():
            of_rows = None if visible is None else visible.expand_as(excess)[hidden]
            found = _least(excess[hidden], index[hidden], of_rows)
            radius[hidden] = torch.where(outside_near, near_excess, math.inf).amin(-1)[hidden].minimum(found)
    inside = (near_excess[..., :top_n] < radius[..., None]).sum(-1, dtype=tail.dtype)

    far = (excess + s_square[..., None]).clamp_(min=0.0).sqrt_()
    if weight is not None:
        far *= weight
    # the K largest sit in this sum with e = 0, each as exactly |s'|
    in_sum = n.clamp(max=index.shape[-1])
    distance = far.sum(-1) - in_sum * s_square.sqrt() + torch.where(outside_near, near, 0.0).sum(-1)
    if not masked_search:
        cancels = (n > top_n) & (radius + s_square < _CANCELS * s_square)
        if cancels.any():
            _recompute(cancels, tokens, inverse_length, tail, e_top, index, visible, s, inside, distance, top_n)
    distance = torch.where(n > top_n, distance, 0.0).clamp(min=0.0)
    separability = torch.ones_like(inside) if top_n == 1 else inside / top_n
    if broken is not None:
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
    inverse_length: Tensor | None,
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
        factor = tail[at].scatter_(-1, index[at], e_top[at])
        if inverse_length is not None:
            factor *= inverse_length[at[0], at[1] // group]
        x = tokens[at[0], at[1] // group]  # [rows, Lk, E]
        gaps = torch.linalg.vector_norm(x * factor[..., None] - s[at][:, None], dim=-1)
        selected = index[at][:, :top_n]
        outside = torch.ones_like(gaps, dtype=torch.bool)
        if visible is not None:
            outside = visible.expand_as(tail)[at].clone()
        outside.scatter_(-1, selected, False)
        radius = torch.where(outside, gaps, math.inf).amin(-1, keepdim=True)
        inside[at] = (gaps.gather(-1, selected) < radius).sum(-1, dtype=tail.dtype)
        distance[at] = torch.where(outside, gaps, 0.0).sum(-1)
