"""The monitor: options, schedule, sums of a step, ranks, snapshots."""

from attnmon.run.monitor import Monitor, watch

__all__ = ["Monitor", "watch"]
