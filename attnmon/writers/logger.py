"""Records through any logger with Lightning's interface (CSV, Weights & Biases, MLflow, ...)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from attnmon.errors import AttnmonWarning, MissingExtra
from attnmon.types import Alert, Snapshot
from attnmon.writers._describe import snapshot_scalars
from attnmon.writers._markdown import alerts_table
from attnmon.writers.base import Writer
from attnmon.writers.heatmap import render_heads, require_pillow


class LoggerWriter(Writer):
    """Scalars to any logger; pictures and the alert table to those that have ``log_image`` and ``log_text``.

    Args:
        logger: has ``log_metrics(metrics, step)``, perhaps ``log_image(key, images, step)`` and
            ``log_text(key, columns, data, step)``, as Lightning's loggers do. It is never closed here.
        images_every: one set of pictures for so many snapshots. Without Pillow there are none, which is warned of.
    """

    def __init__(self, logger: Any, *, images_every: int = 10) -> None:
        self._logger = logger
        self._log_image: Any = getattr(logger, "log_image", None)
        if callable(self._log_image):
            try:
                require_pillow()
            except MissingExtra as error:
                self._log_image = None
                warnings.warn(f"attnmon: pictures are left out: {error}", AttnmonWarning, stacklevel=2)
        self._images_every = images_every
        self._num_snapshots = 0

    def write_snapshot(self, snapshot: Snapshot) -> None:
        self._logger.log_metrics(snapshot_scalars(snapshot), step=snapshot.step)
        if callable(self._log_image) and self._num_snapshots % self._images_every == 0:
            for metric in snapshot.metrics:
                picture = render_heads(snapshot, metric)
                self._log_image(key=f"attnmon/heads/{metric}", images=[picture], step=snapshot.step)
        self._num_snapshots += 1

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        log_text = getattr(self._logger, "log_text", None)
        if callable(log_text):
            step = max(alert.step for alert in alerts)
            log_text(key="attnmon/alerts", columns=["alerts"], data=[[alerts_table(list(alerts), 0)]], step=step)
