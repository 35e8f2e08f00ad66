"""The base of every writer. A writer gets plain data: snapshots and alerts, never a tensor of the model."""

from __future__ import annotations

from collections.abc import Sequence

from attnmon.types import Alert, Snapshot


class Writer:
    """Base of all writers. Its methods do nothing, so a subclass defines only those that it needs.

    The monitor calls a writer on rank 0 only, from the training process.
    """

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Record one snapshot."""

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        """Record new alerts; ``alerts`` is never empty."""

    def flush(self) -> None:
        """Make all records written so far visible to readers."""

    def close(self) -> None:
        """Flush and release files; the monitor does not use the writer afterwards."""
