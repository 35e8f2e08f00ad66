"""What the tests of the monitor share with those of several ranks: ways to run it and to keep what it writes."""

import numpy as np

import attnmon
from attnmon.writers import Writer

EVERY_ROW = {"rows": None, "sequences": None, "top_n": 4, "on_error": "raise"}


def run(monitor, model, *micro_batches, step=None, **arguments):
    with monitor.step(step):
        for hidden in micro_batches:
            model(hidden, **arguments).square().mean().backward()
    return monitor.latest


def assert_close(one, other, rtol=2e-6):
    """Two snapshots with the same numbers."""
    assert one.modules == other.modules
    assert one.metrics == other.metrics
    for path in one.modules:
        np.testing.assert_array_equal(one.rows[path], other.rows[path])
        np.testing.assert_array_equal(one.excluded[path], other.excluded[path])
    for metric in one.metrics:
        for path, heads in one[metric].items():
            np.testing.assert_allclose(heads, other[metric][path], rtol=rtol, atol=1e-7, err_msg=f"{metric} {path}")


class Keeper(Writer):
    def __init__(self):
        self.steps, self.alerts, self.log = [], [], []

    def write_snapshot(self, snapshot):
        self.steps.append(snapshot.step)
        self.log.append(("snapshot", snapshot.step))

    def write_alerts(self, alerts):
        self.alerts += alerts
        self.log.append(("alerts", len(alerts)))

    def flush(self):
        self.log.append("flush")

    def close(self):
        self.log.append("close")


def attnmon_of(model, hidden, **options):
    with attnmon.watch(model, **{**EVERY_ROW, **options}) as monitor:
        return run(monitor, model, hidden)
