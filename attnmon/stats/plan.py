"""Which rows of a call are measured: strata over the valid positions, moved by a fixed sequence.

Row ``k`` of R is drawn from the k-th of R equal strata of the sequence's valid positions, all at the same
relative place u; from draw to draw u follows the golden-ratio sequence, from sequence to sequence the plastic
one (both of low discrepancy). No random state is read or written, and padding moves no sampled row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmon.stats.packing import Packing
from attnmon.stats.settings import Settings
from attnmon.stats.visibility import documents, key_valid, visible_keys
from attnmon.types import EXCLUSION_REASONS, AttentionCall

_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927
_PLANNING_ELEMENTS = 1 << 22  # of a dense mask, looked at per block while rows are classified


@dataclass(slots=True)
class Plan:
    """Sampled rows of one call; may be shared by all calls of a step that look alike.

    Attributes:
        sequences: slice over B selecting S sequences.
        positions: [S, R] int64 query positions.
        live: [S, R] bool; False marks a filler (fewer valid rows than R) or a row that is excluded. None
            means all are live.
        first_key: [S, R] int64, first key of the row's sequence; None means 0.
        padding, masked: [S] int64 (or [1]), rows of the sampled sequences that are excluded, over all
            positions; None means none.
        gathered: ``call.logits`` already holds the sampled rows alone, [S, H, R, Lk].
        shared: what implementations compute once per plan (visibility, directions), by keys of their own.
    """

    sequences: slice
    positions: Tensor
    live: Tensor | None
    first_key: Tensor | None
    padding: Tensor | None
    masked: Tensor | None
    gathered: bool = False
    shared: dict[Any, Any] = field(default_factory=dict)


def choose_sequences(batch: int, settings: Settings, draw: int) -> slice:
    """Which sequences of a batch a measurement samples: evenly spaced ones.

    Args:
        batch: B.
        settings: how many are wanted.
        draw: number of the measurement, from 0; it moves the choice.
    """
    wanted = batch if settings.sequences is None else min(settings.sequences, batch)
    stride = batch // wanted
    slack = batch - stride * (wanted - 1)  # valid starts: 0 .. slack - 1
    start = int(((0.5 + draw * _GOLDEN) % 1.0) * slack)
    return slice(start, start + stride * (wanted - 1) + 1, stride)


def make_plan(call: AttentionCall, settings: Settings, draw: int = 0) -> Plan:
    """Choose the rows of a call that a measurement samples.

    Args:
        call: the call; of its tensors, masks and given logits are read, queries and keys are not.
        settings: how many rows and sequences, and how many keys a row must see.
        draw: number of the measurement, from 0; it moves the choice.
    """
    source = call.query if call.query is not None else call.logits
    assert source is not None
    batch, length, device = source.shape[0], source.shape[2], source.device
    num_keys = call.logits.shape[3] if call.key is None else call.key.shape[2]  # type: ignore[union-attr]

    sequences = choose_sequences(batch, settings, draw)
    wanted = len(range(*sequences.indices(batch)))
    keys_seen, column_seen = _row_counts(call, sequences, wanted, length, num_keys, device)
    padding_query = None
    if column_seen is not None and length == num_keys and not call.is_cross and call.positions is None:
        padding_query = ~column_seen
    # only head 0 is looked at here; where a mask differs by head, the implementation looks at each head
    one_mask = (call.attn_mask is None or call.attn_mask.shape[1] == 1) and not call.mask_mod_by_head
    usable = keys_seen >= (settings.min_keys if one_mask else 0)
    if padding_query is not None:
        usable = usable & ~padding_query

    if settings.rows is None:
        positions = torch.arange(length, device=device).expand(wanted, length)
        live: Tensor | None = usable.expand(wanted, length)
    else:
        rows = settings.rows
        if call.cu_seqlens is not None and settings.sequences is not None:
            rows = rows * min(settings.sequences, call.cu_seqlens.shape[0] - 1)
        rows = min(rows, length)
        positions, live = _strata(usable.expand(wanted, length), rows, draw)

    masked = None
    if one_mask:
        masked = keys_seen == 0
        if padding_query is not None:
            masked = masked & ~padding_query
    return Plan(
        sequences=sequences,
        positions=positions,
        live=live,
        first_key=_first_keys(call, column_seen, positions),
        padding=None if padding_query is None else padding_query.sum(-1).expand(wanted),
        masked=None if masked is None else masked.sum(-1).expand(wanted),
    )


def excluded_rows(plan: Plan, packing: Packing, num_heads: int, dtype: torch.dtype) -> Tensor:
    """A packed matrix that counts the rows that a plan leaves out and holds no measured row.

    Args:
        plan: the plan.
        packing: layout of the result.
        num_heads: H; each head leaves out the same rows.
        dtype: of the result.

    Returns:
        [columns, H].
    """
    result = torch.zeros(packing.num_columns, num_heads, dtype=dtype, device=plan.positions.device)
    result[packing.num_sums :] = -math.inf
    for reason, excluded in (("padding", plan.padding), ("masked", plan.masked)):
        if excluded is not None:
            result[1 + EXCLUSION_REASONS.index(reason)] += excluded.sum()
    return result


def _strata(usable: Tensor, rows: int, draw: int) -> tuple[Tensor, Tensor]:
    """Positions [S, R] at equal distances among the True entries of ``usable`` [S, Lq], and which are live."""
    device = usable.device
    rank_at = usable.cumsum(-1)  # rank of a position among the usable ones, from 1
    available = rank_at[:, -1:]
    offset = (0.5 + draw * _GOLDEN + torch.arange(usable.shape[0], device=device, dtype=torch.float32) * _PLASTIC) % 1.0
    strata = torch.arange(rows, device=device)
    # with at least one row a stratum the common offset keeps ranks distinct; with fewer, take each row once
    spread = ((strata + offset[:, None]) * (available / rows)).long()
    rank = torch.where(available > rows, spread.minimum(available - 1), strata)
    live = rank < available
    positions = torch.searchsorted(rank_at, rank + 1).clamp_(max=usable.shape[1] - 1)
    return positions, live


def _row_counts(
    call: AttentionCall, sequences: slice, wanted: int, length: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Visible keys of each row, [S or 1, Lq], and keys that any row sees, [S, Lk] (None = all); head 0."""
    has_matrix = call.attn_mask is not None and call.attn_mask.shape[2] > 1
    if call.logits is not None or call.cu_seqlens is not None or call.mask_mod is not None or has_matrix:
        return _dense_row_counts(call, sequences, wanted, length, num_keys, device)
    valid = key_valid(call, sequences)
    rows = torch.arange(length, device=device) + call.causal_offset
    high = torch.full_like(rows, num_keys)  # one past the last visible key
    low = torch.zeros_like(rows)
    if call.is_causal:
        high = high.minimum(rows + 1)
    if call.window is not None:
        left, right = call.window
        if right is not None:
            high = high.minimum(rows + right + 1)
        if left is not None:
            low = low.maximum(rows - left)
    high = high.clamp(min=0)
    low = low.clamp(max=num_keys).minimum(high)
    if valid is None:
        return (high - low)[None], None
    before = torch.nn.functional.pad(valid.cumsum(-1), (1, 0))  # valid keys before a position
    return before[:, high] - before[:, low], valid


def _dense_row_counts(
    call: AttentionCall, sequences: slice, wanted: int, length: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    counts, column_seen = [], torch.zeros(wanted, num_keys, dtype=torch.bool, device=device)
    block = max(1, _PLANNING_ELEMENTS // (wanted * num_keys))
    for first in range(0, length, block):
        positions = torch.arange(first, min(first + block, length), device=device).expand(wanted, -1)
        if call.logits is not None:
            logits = call.logits[sequences, 0, first : first + block]
            visible: Tensor | None = ~(logits <= logit_threshold(call.logits.dtype))
        else:
            visible, _ = visible_keys(call, sequences, positions, slice(0, 1), slice(0, num_keys))
            assert visible is not None
            visible = visible[:, 0].expand(wanted, positions.shape[1], num_keys)
        assert visible is not None
        counts.append(visible.sum(-1))
        column_seen |= visible.any(-2)
    return torch.cat(counts, -1), column_seen


def logit_threshold(dtype: torch.dtype) -> float:
    """The value at or below which a given logit counts as masked.

    The sum of a logit and a mask keeps the mask's magnitude.

    Args:
        dtype: of the logits.
    """
    # half of min / 2, since a positive logit lifts finfo.min a little in low precision
    return max(torch.finfo(dtype).min / 4, -1e7)


def _first_keys(call: AttentionCall, column_seen: Tensor | None, positions: Tensor) -> Tensor | None:
    if call.cu_seqlens is not None:
        starts = call.cu_seqlens.long()
        return starts[documents(call.cu_seqlens, positions)]
    if column_seen is None:
        return None
    return column_seen.long().argmax(-1)[:, None].expand_as(positions)
