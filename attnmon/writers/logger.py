"""A writer for loggers with Lightning's interface (CSV, Weights & Biases, MLflow, ...)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from attnmon.checks import check_whole
from attnmon.errors import AttnmonWarning, MissingExtra
from attnmon.types import Alert, Snapshot
from attnmon.writers._describe import snapshot_scalars
from attnmon.writers._markdown import alerts_table
from attnmon.writers.base import Writer
from attnmon.writers.heatmap import render_heads, require_pillow


class LoggerWriter(Writer):
    """Sends scalars to a logger, and pictures and a table of alerts to a logger that accepts them.

    Keys (units as in ``attnmon.metrics.METRICS``):

    - ``attnmon/<metric>/mean``, ``/min``, ``/max``, ``attnmon/rows/total``, ``attnmon/excluded/total``,
      ``attnmon/excluded/<reason>``: the scalars that ``TensorBoardWriter`` documents, through ``log_metrics``.
    - ``attnmon/heads/<metric>``: heatmap, layers down, heads across, through ``log_image``.
    - ``attnmon/alerts``: Markdown table of the new alerts, through ``log_text``.

    Args:
        logger: has ``log_metrics(metrics, step)`` and optionally ``log_image(key, images, step)`` and
            ``log_text(key, columns, data, step)``, as Lightning's loggers do. The writer never closes it.
        images_every: number of snapshots per set of pictures. Without Pillow there are no pictures, which an
            AttnmonWarning says.

    Raises:
        AttnmonError: ``images_every`` is not a whole number of at least 1.
    """

    def __init__(self, logger: Any, *, images_every: int = 10) -> None:
        check_whole("images_every", images_every)
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
            log_text(key="attnmon/alerts", columns=["alerts"], data=[[alerts_table(alerts)]], step=step)
