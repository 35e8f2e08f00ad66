"""Where records go. A writer gets plain data: snapshots and alerts, never a tensor of the model."""

from __future__ import annotations

from collections.abc import Sequence

from attnmon.types import Alert, Snapshot


class Writer:
    """Base of all writers; does nothing, so that callers never branch.

    A writer is called on rank 0 only, from the training process, at the pace that the monitor decides.
    """

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Record one snapshot."""

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        """Record new alerts; called only with at least one."""

    def flush(self) -> None:
        """Make what was written visible to readers."""

    def close(self) -> None:
        """Flush and release files; the writer is not used afterwards."""
