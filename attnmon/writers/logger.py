"""Records through any logger with Lightning's interface (CSV, Weights & Biases, MLflow, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnmon.types import Alert, Snapshot
from attnmon.writers._describe import snapshot_scalars
from attnmon.writers._markdown import alerts_table
from attnmon.writers.base import Writer
from attnmon.writers.heatmap import render_heads


class LoggerWriter(Writer):
    """Scalars to any logger; pictures and the alert table to those that have ``log_image`` and ``log_text``.

    Args:
        logger: has ``log_metrics(metrics, step)``, perhaps ``log_image(key, images, step)`` and
            ``log_text(key, columns, data, step)``, as Lightning's loggers do. It is never closed here.
        images_every: one set of pictures for so many snapshots.
    """

    def __init__(self, logger: Any, *, images_every: int = 10) -> None:
        self._logger = logger
        self._images_every = images_every
        self._num_snapshots = 0

    def write_snapshot(self, snapshot: Snapshot) -> None:
        self._logger.log_metrics(snapshot_scalars(snapshot), step=snapshot.step)
        log_image = getattr(self._logger, "log_image", None)
        if callable(log_image) and self._num_snapshots % self._images_every == 0:
            for metric in snapshot.metrics:
                log_image(key=f"attnmon/heads/{metric}", images=[render_heads(snapshot, metric)], step=snapshot.step)
        self._num_snapshots += 1

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        log_text = getattr(self._logger, "log_text", None)
        if callable(log_text):
            step = max(alert.step for alert in alerts)
            log_text(key="attnmon/alerts", columns=["alerts"], data=[[alerts_table(list(alerts), 0)]], step=step)
