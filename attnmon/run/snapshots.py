"""From a step's matrices to a snapshot, and what a closed copy of a monitor keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmon.capture import CoverageRecord
from attnmon.metrics import METRICS
from attnmon.stats.packing import Packing
from attnmon.stats.settings import Settings
from attnmon.types import Alert, Snapshot


@dataclass(frozen=True)
class ClosedState:
    """What a monitor had seen when it was copied."""

    snapshot: Snapshot | None
    alerts: list[Alert]
    coverage: list[CoverageRecord]
    state: dict[str, Any]
    settings: Settings
    every_n_steps: int
    write_every_n_steps: int


def make_snapshot(
    step: int,
    paths: Sequence[str],
    matrices: Mapping[str, NDArray[np.float64]],
    packing: Packing,
    settings: Settings,
) -> Snapshot:
    """The snapshot of an optimizer step.

    Args:
        step: its number.
        paths: of the measured modules, in the model's order.
        matrices: path -> packed sums and maxima [columns, heads].
        packing: what the columns are.
        settings: goes into the snapshot.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in packing.metrics}
    by_reason: dict[str, dict[str, Any]] = {}
    for path in paths:
        for name, heads in packing.values(matrices[path]).items():
            # what a module does not have at all is absent, not "no data"
            if not (METRICS[name].needs and np.isnan(heads).all()):
                values[name][path] = heads
        for reason, counts in packing.excluded(matrices[path]).items():
            by_reason.setdefault(reason, {})[path] = counts
    return Snapshot(
        step=step,
        modules=tuple(paths),
        values={name: heads for name, heads in values.items() if heads or not METRICS[name].needs},
        rows={path: packing.rows(matrices[path]) for path in paths},
        excluded={path: sum(by_reason[reason][path] for reason in by_reason) for path in paths},
        excluded_by_reason=by_reason,
        settings=settings.to_dict(),
    )
