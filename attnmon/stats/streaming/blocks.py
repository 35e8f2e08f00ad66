"""How the sampled rows of a call are cut into blocks, and which keys a block can see.

A block holds whole rows, as many as a fixed number of logits allows, so that memory does not grow with Lk or with the
number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnmon.stats.plan import Plan
from attnmon.types import AttentionCall

BLOCK_CPU = 1 << 20
"""Logits per block, in three buffers of 4 MiB; small operations cost the same for any block."""

BLOCK_OTHER = 1 << 24
"""Logits per block on devices other than a CPU."""

_KEY_ALIGNMENT = 16


@dataclass(frozen=True)
class Block:
    """Sampled sequences x query heads x sampled positions, and the keys any of these rows can see."""

    sequences: slice
    heads: slice
    rows: slice
    keys: slice

    @property
    def num_keys(self) -> int:
        """How many keys any of the rows can see at most."""
        return int(self.keys.stop - self.keys.start)

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What tells the block's sequences and rows from those of other blocks, whatever its heads."""
        return (self.sequences.start, self.sequences.stop, self.rows.start, self.rows.stop)


def cut(
    call: AttentionCall, plan: Plan, *, num_keys: int, group: int, on_cpu: bool, range_known: bool
) -> Iterator[Block]:
    """Blocks of whole rows and whole groups of heads; those that share keys and values follow one another.

    Args:
        call: the call.
        plan: its sampled rows.
        num_keys: Lk.
        group: query heads per key head.
        on_cpu: the tensors are on a CPU, where blocks are smaller and asking for a number costs no wait.
        range_known: positions alone tell which range of keys a row can see at most, and no row needs more.
    """
    sequences, all_rows = plan.positions.shape
    groups = call.num_heads // group
    elements = BLOCK_CPU if on_cpu else BLOCK_OTHER
    # keys are read once or twice, logits some thirty times
    per_group = num_keys * max(group * all_rows, call.head_dim // 4)
    step_groups = min(groups, max(1, elements // per_group))
    step_sequences = min(sequences, max(1, elements // (per_group * groups))) if step_groups == groups else 1
    step_rows = max(1, elements // (num_keys * group * step_groups * step_sequences))
    for s in range(0, sequences, step_sequences):
        for g in range(0, groups, step_groups):
            box = slice(s, min(s + step_sequences, sequences))
            heads = slice(g * group, min(g + step_groups, groups) * group)
            for r in range(0, all_rows, step_rows):
                stop = min(r + step_rows, all_rows)
                keys = slice(0, num_keys)
                if on_cpu and range_known:
                    keys = _keys_of(call, plan, r, stop, num_keys)
                yield Block(box, heads, slice(r, stop), keys)


def _keys_of(call: AttentionCall, plan: Plan, first: int, last: int, num_keys: int) -> slice:
    """Keys that rows first ... last - 1 of any sequence can see at most; whole chunks, and never none."""
    low, high = 0, num_keys
    positions = plan.positions[:, first:last] + call.causal_offset
    left, right = call.window or (None, None)
    if call.is_causal:
        right = 0 if right is None else min(right, 0)
    if right is not None:
        high = min(high, int(positions.max()) + right + 1)
    if left is not None:
        low = max(low, int(positions.min()) - left)
    low = min(max(low, 0), num_keys - 1) // _KEY_ALIGNMENT * _KEY_ALIGNMENT
    high = -(-max(high, low + 1) // _KEY_ALIGNMENT) * _KEY_ALIGNMENT
    return slice(low, min(high, num_keys))
