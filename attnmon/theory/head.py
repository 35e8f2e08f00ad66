"""Everything the geometry of section 3 says of one head, for several N at once, over rows that share their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attnmon.checks import check_whole
from attnmon.errors import AttnmonError
from attnmon.theory.expectation import main_term, residual_factor, residual_spread
from attnmon.theory.geometry import bound_from, furthest_pairs, pair_squares
from attnmon.theory.rows import TokenRows, ranking, selection
from attnmon.theory.separation import Separation, least_pair, separation

_BLOCK = 128  # rows at a time: the running maximum of the bound then stays in the cache


@dataclass(frozen=True, slots=True, eq=False)
class HeadGeometry:
    """One head's rows at one N; every tensor is [R] of the weights' dtype.

    Attributes:
        top_n: N.
        distance: d~ of I_N (``top_n_distance``).
        bound: Theorem 1(1) (``distance_bound``); None if it was not asked for.
        expected: main term of E[d~] (``expected_distance``).
        residual: bound of what it lacks (``expected_distance_residual``).
        separation: Theorem 2 and all that goes with it; NaN in rows with n <= N.

    Source: paper, section 3, Theorems 1 and 2.
    """

    top_n: int
    distance: Tensor
    bound: Tensor | None
    expected: Tensor
    residual: Tensor
    separation: Separation


def head_geometry(
    weights: Tensor, tokens: Tensor, top_n: Sequence[int], visible: Tensor | None = None, *, bound: bool = True
) -> list[HeadGeometry]:
    """Compute distance, its bound, its expectation and separability of a head's rows, for every N of a list.

    The numbers equal those of the functions that take one N; the ranking, the products and the running maximum are
    shared.

    Args:
        weights: float32 or float64 [R, n], p; those of hidden keys are not read.
        tokens: float [n, E], x, the keys of all rows.
        top_n: N, each at least 1, in any order.
        visible: bool, broadcastable to [R, n]; None: all keys. Causal rows (prefixes of the keys) are the fast case.
        bound: compute Theorem 1's bound, too, which costs about as much as all else.

    Returns:
        One record for each N, in the order given.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, ``top_n`` is empty, or an N is no whole number of
            at least 1.

    Source: paper, section 3, Theorems 1 and 2.
    """
    if weights.ndim != 2 or tokens.ndim != 2:
        raise AttnmonError(
            f"expected weights [rows, keys] and tokens [keys, E], got {list(weights.shape)}, {list(tokens.shape)}"
        )
    if not top_n:
        raise AttnmonError("top_n is empty; give at least one N")
    for number in top_n:
        check_whole("top_n", number)
    order = sorted(set(top_n))
    chunks = []
    squares = pair_squares(tokens)
    delta = least_pair(TokenRows(weights, tokens, visible), squares)
    for start in range(0, weights.shape[0], _BLOCK):
        part = slice(start, start + _BLOCK)
        mask = None if visible is None else visible.expand(weights.shape)[part]
        length = _seen_keys(mask, weights.shape[1])
        rows = TokenRows(weights[part, :length], tokens[:length], None if mask is None else mask[:, :length])
        chunks.append(_measure(rows, order, squares[:length, :length], delta[part], bound))
    records = {number: _joined(number, [chunk[i] for chunk in chunks], weights) for i, number in enumerate(order)}
    return [records[number] for number in top_n]


def _seen_keys(mask: Tensor | None, length: int) -> int:
    """Count the keys up to the last one that any of the rows sees; at least one."""
    if mask is None:
        return length
    seen = mask.any(0).nonzero()
    return int(seen[-1]) + 1 if seen.numel() else 1


def _measure(rows: TokenRows, top_n: list[int], squares: Tensor, delta: Tensor, bound: bool) -> list[HeadGeometry]:
    """Measure one block of rows, in float64."""
    length = rows.p.shape[-1]
    top, index = ranking(rows, min(length, top_n[-1] + 1))
    inside = [selection(rows, index, number) for number in top_n]
    furthest = furthest_pairs(rows, index, top_n, inside, squares) if bound else None
    spread = residual_spread(rows)
    found = []
    for i, number in enumerate(top_n):
        measured, distance = separation(rows, top, index, inside[i], number, delta)
        found.append(
            HeadGeometry(
                top_n=number,
                distance=distance,
                bound=None if furthest is None else bound_from(rows, top, index, inside[i], number, furthest[i]),
                expected=main_term(rows, number),
                residual=residual_factor(rows, number) * spread,
                separation=measured,
            )
        )
    return found


def _joined(top_n: int, blocks: list[HeadGeometry], like: Tensor) -> HeadGeometry:
    """Join the blocks of one N, in the dtype of the weights."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(like.dtype) if parts else like.new_empty(0)

    bounds = [block.bound for block in blocks if block.bound is not None]
    return HeadGeometry(
        top_n=top_n,
        distance=join([block.distance for block in blocks]),
        bound=join(bounds) if bounds or not blocks else None,
        expected=join([block.expected for block in blocks]),
        residual=join([block.residual for block in blocks]),
        separation=Separation(
            *(join([getattr(block.separation, field.name) for block in blocks]) for field in fields(Separation))
        ),
    )
