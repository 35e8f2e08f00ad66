"""The monitor: options, schedule, sums of a step, ranks, snapshots."""
