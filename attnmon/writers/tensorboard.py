"""Snapshots and alerts in TensorBoard. The only file that imports tensorboard."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from attnmon.errors import AttnmonError, MissingExtra
from attnmon.types import Alert, Snapshot
from attnmon.writers._describe import pool, snapshot_scalars
from attnmon.writers._markdown import alerts_table, legend
from attnmon.writers.base import Writer
from attnmon.writers.heatmap import heads_png, render_heads, require_pillow

MAX_ALERTS = 100
"""Alerts kept for the table; older ones are counted in a line below it."""


class TensorBoardWriter(Writer):
    """One point a snapshot, at ``snapshot.step``.

    Tags (units as in ``attnmon.metrics.METRICS``):

    - ``attnmon/<metric>/mean``, ``/min``, ``/max``: over all heads of all modules, heads weighing alike. Heads whose
      value is not finite (no data, an infinite temperature) are left out; a metric without any is not written.
    - ``attnmon/rows/total``, ``attnmon/excluded/total``: rows (query positions, summed over heads) that entered the
      statistics, and those left out; ``attnmon/excluded/<reason>`` splits the latter (padding, masked, nonfinite).
    - ``attnmon/heads/<metric>``: heatmap, layers down, heads across (``attnmon.writers.heatmap``).
    - ``attnmon/alerts``: Markdown table of the newest 100 alerts, newest first, rewritten with every new alert.
    - ``attnmon/legend``: once; formula, unit, range, choices (N, tokens, eps) and source of each metric.

    Pictures are written for the first snapshot, every ``images_every``-th after it, the last one (at ``close``), and of
    an alert's metric at the alert's step. A 12 x 12 picture is about 5 kB a metric.

    The event file is created by the first record, so that a writer on a rank that never writes leaves none.
    A resumed run that writes to the same directory shows repeated steps twice; to have TensorBoard drop the older
    points, give a ``SummaryWriter(logdir, purge_step=...)``.

    Args:
        logdir: where the event file goes; None is SummaryWriter's own choice, ``runs/<date>_<host>``.
        summary_writer: write through this SummaryWriter (Lightning's ``logger.experiment``, say) instead. It is flushed
            but never closed. One of another library is used through ``add_scalar``, ``add_image`` and ``add_text``.
        images_every: one set of pictures for so many snapshots; None for no pictures.

    Raises:
        AttnmonError: both ``logdir`` and ``summary_writer``, or ``images_every`` below 1.
        MissingExtra: tensorboard (unless ``summary_writer`` does without) or, for pictures, Pillow is not installed.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        *,
        summary_writer: Any = None,
        images_every: int | None = 10,
    ) -> None:
        if logdir is not None and summary_writer is not None:
            raise AttnmonError("got both logdir and summary_writer; give one of them")
        if images_every is not None and images_every < 1:
            raise AttnmonError(f"images_every is {images_every}; expected a number of snapshots, 1 or more, or None")
        if summary_writer is None:
            _import_tensorboard()
        if images_every is not None:
            require_pillow()
        self._logdir = None if logdir is None else os.fspath(logdir)
        self._given = summary_writer
        self._own: Any = None
        self._images_every = images_every
        self._num_snapshots = 0
        self._last: Snapshot | None = None
        self._drawn: set[str] = set()  # metrics whose picture of the last snapshot is written
        self._has_legend = False
        self._alerts: deque[Alert] = deque(maxlen=MAX_ALERTS)
        self._num_alerts = 0

    def write_snapshot(self, snapshot: Snapshot) -> None:
        self._last, self._drawn = snapshot, set()
        is_due = self._images_every is not None and self._num_snapshots % self._images_every == 0
        self._num_snapshots += 1
        self._target().scalars(snapshot_scalars(snapshot), snapshot.step)
        if not self._has_legend:
            self._target().text("attnmon/legend", legend(snapshot), snapshot.step)
            self._has_legend = True
        if is_due:
            self._draw(snapshot.metrics)

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        self._alerts.extend(alerts)
        self._num_alerts += len(alerts)
        newest_first = sorted(self._alerts, key=lambda alert: alert.step, reverse=True)
        text = alerts_table(newest_first, self._num_alerts - len(self._alerts))
        self._target().text("attnmon/alerts", text, max(alert.step for alert in alerts))
        if self._images_every is not None and self._last is not None:
            step = self._last.step
            self._draw({alert.metric: None for alert in alerts if alert.step == step and alert.metric in self._last})

    def flush(self) -> None:
        writer = self._own if self._given is None else self._given
        if writer is not None:
            writer.flush()

    def close(self) -> None:
        """Write the last snapshot's pictures; close the own SummaryWriter, flush a given one."""
        # A given writer that its owner has closed would open a new event file for this.
        is_open = self._own is not None or getattr(self._given, "file_writer", None) is not None
        try:
            if self._images_every is not None and self._last is not None and is_open:
                self._draw(self._last.metrics)
            if self._given is not None and is_open:
                self._given.flush()
        finally:
            self._last = None
            if self._own is not None:
                own, self._own = self._own, None
                own.close()

    def _draw(self, metrics: Any) -> None:
        assert self._last is not None
        todo = [metric for metric in metrics if metric not in self._drawn and pool(self._last[metric]) is not None]
        if todo:
            self._target().images(todo, self._last)
            self._drawn.update(todo)

    def _target(self) -> _EventFile | _AnyLogger:
        writer = self._given
        if writer is None:
            if self._own is None:
                self._own = _import_tensorboard().SummaryWriter(self._logdir)
            writer = self._own
        # SummaryWriter.file_writer is public; it is None after close(), and the add_ methods then open a new one.
        file_writer = getattr(writer, "file_writer", None)
        if file_writer is not None and type(file_writer).__module__ == "torch.utils.tensorboard.writer":
            return _EventFile(file_writer)
        return _AnyLogger(writer)


class _EventFile:
    """Whole snapshots as one event: fewer records than add_scalar makes, and PNGs as we encode them."""

    def __init__(self, file_writer: Any) -> None:
        self._file_writer = file_writer
        self._proto = importlib.import_module("tensorboard.compat.proto.summary_pb2")

    def scalars(self, scalars: dict[str, float], step: int) -> None:
        summary = self._proto.Summary()
        for tag, number in scalars.items():
            summary.value.add(tag=tag, simple_value=number)
        self._file_writer.add_summary(summary, step)

    def images(self, metrics: Sequence[str], snapshot: Snapshot) -> None:
        summary = self._proto.Summary()
        for metric in metrics:
            png, width, height = heads_png(snapshot, metric)
            image = self._proto.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
            summary.value.add(tag=f"attnmon/heads/{metric}", image=image)
        self._file_writer.add_summary(summary, snapshot.step)

    def text(self, tag: str, text: str, step: int) -> None:
        # As SummaryWriter.add_text does it, but under the tag itself: add_text appends "/text_summary".
        tensor = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        shape = importlib.import_module("tensorboard.compat.proto.tensor_shape_pb2").TensorShapeProto
        types = importlib.import_module("tensorboard.compat.proto.types_pb2")
        content = tensor.TensorProto(
            dtype=types.DT_STRING, string_val=[text.encode()], tensor_shape=shape(dim=[shape.Dim(size=1)])
        )
        summary = self._proto.Summary()
        value = summary.value.add(tag=tag, tensor=content)
        value.metadata.plugin_data.plugin_name = "text"
        self._file_writer.add_summary(summary, step)


class _AnyLogger:
    """A SummaryWriter of another library (tensorboardX), or a stand-in with its methods."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def scalars(self, scalars: dict[str, float], step: int) -> None:
        for tag, number in scalars.items():
            self._logger.add_scalar(tag, number, step)

    def images(self, metrics: Sequence[str], snapshot: Snapshot) -> None:
        for metric in metrics:
            picture = render_heads(snapshot, metric)
            self._logger.add_image(f"attnmon/heads/{metric}", picture, snapshot.step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        self._logger.add_text(tag, text, step)


def _total(counts: Any) -> float:
    return float(sum(int(heads.sum()) for heads in counts.values()))


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", "TensorBoardWriter") from error
