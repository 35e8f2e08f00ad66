"""Partial results between the four launches: one allocation, and what each piece of it holds."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmon.stats.fused.fields import RECORD_FIELDS, SELECT_FIELDS, SPREAD_FIELDS


def numbers_per_row(splits: int, slots: int, width: int) -> dict[str, int]:
    """How many numbers of 32 bits each partial result takes per row, in the order in which they lie in memory."""
    return {
        "partial_select": splits * SELECT_FIELDS,
        "part_z": splits * slots,
        "part_i": splits * slots,
        "record": RECORD_FIELDS,
        "list_z": slots,
        "list_i": slots,
        "near_square": slots,
        "near_excess": slots,
        "s_vectors": width,
        "partial_spread": splits * SPREAD_FIELDS,
        "nearest": splits,
    }


def make_scratch(total: int, splits: int, slots: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """Room for the partial results of ``total`` rows, all in one allocation; every number is written before it is read.

    Args:
        total: rows of all heads.
        splits: parts that the keys are cut into.
        slots: of a row's list of largest logits.
        width: E of the token vectors.
        device: where the room is.
    """
    sizes = {name: total * numbers for name, numbers in numbers_per_row(splits, slots, width).items()}
    buffer = torch.empty(sum(sizes.values()), dtype=torch.float32, device=device)
    pieces = dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))
    for name in ("part_i", "list_i", "nearest"):  # indices of keys
        pieces[name] = pieces[name].view(torch.int32)
    return pieces
