"""A writer for TensorBoard. The only file that imports tensorboard."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from attnmon.checks import check_whole
from attnmon.errors import AttnmonError, MissingExtra
from attnmon.types import Alert, Snapshot
from attnmon.writers._describe import pool, snapshot_scalars
from attnmon.writers._markdown import alerts_table, legend
from attnmon.writers.base import Writer
from attnmon.writers.heatmap import heads_png, render_heads, require_pillow

_MAX_ALERTS = 100  # kept for the table; a line below it counts the older ones


class TensorBoardWriter(Writer):
    """Writes every snapshot to an event file of TensorBoard, at ``snapshot.step``, and a table of alerts.

    Tags (units as in ``attnmon.metrics.METRICS``):

    - ``attnmon/<metric>/mean``, ``/min``, ``/max``: over all heads of all modules, heads weighing alike. Heads whose
      value is not finite (no data, an infinite temperature) are left out; a metric without any is not written.
    - ``attnmon/rows/total``, ``attnmon/excluded/total``: rows (query positions, summed over heads) that entered the
      statistics, and rows left out; ``attnmon/excluded/<reason>`` counts those by reason (padding, masked, nonfinite).
    - ``attnmon/heads/<metric>``: heatmap, layers down, heads across (``attnmon.writers.heatmap``).
    - ``attnmon/alerts``: Markdown table of the newest 100 alerts, newest first, rewritten with every new alert.
    - ``attnmon/legend``: once; formula, unit, range, choices (N, tokens, eps) and source of each metric.

    Pictures are written for the first snapshot, for every ``images_every``-th one after it, for the last one (at
    ``close``), and at an alert's step for the alert's metric. A picture of 12 x 12 heads takes about 5 kB per metric.

    The event file is created by the first record, so a writer on a rank that never writes leaves no file. If a resumed
    run writes to the same directory, repeated steps appear twice; ``SummaryWriter(logdir, purge_step=...)`` as
    ``summary_writer`` makes TensorBoard drop the older points.

    Args:
        logdir: directory of the event file; None means SummaryWriter's default, ``runs/<date>_<host>``.
        summary_writer: a SummaryWriter to use instead, such as Lightning's ``logger.experiment``. It is flushed but
            never closed. A SummaryWriter of another library is used through ``add_scalar``, ``add_image`` and
            ``add_text``.
        images_every: number of snapshots per set of pictures; None for no pictures.

    Raises:
        AttnmonError: both ``logdir`` and ``summary_writer`` are given, or ``images_every`` is out of range.
        MissingExtra: tensorboard is not installed and ``summary_writer`` is None, or pictures are on and Pillow is not
            installed.
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
        check_whole("images_every", images_every, none_means="no pictures")
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
        self._alerts: deque[Alert] = deque(maxlen=_MAX_ALERTS)
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
        """Write the pictures of the last snapshot, then close the SummaryWriter, or flush it if it was given."""
        # A given SummaryWriter that its owner has closed would open a new event file if it were used.
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

    def _target(self) -> _EventFile | _AddMethods:
        writer = self._given
        if writer is None:
            if self._own is None:
                self._own = _import_tensorboard().SummaryWriter(self._logdir)
            writer = self._own
        # SummaryWriter.file_writer is public; it is None after close(), and the add_ methods then open a new one.
        file_writer = getattr(writer, "file_writer", None)
        if file_writer is not None and type(file_writer).__module__ == "torch.utils.tensorboard.writer":
            return _EventFile(file_writer)
        return _AddMethods(writer)


class _EventFile:
    """Writes all scalars of a snapshot as one event, and PNGs in attnmon's own encoding, which are smaller."""

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


class _AddMethods:
    """Writes through the ``add_`` methods of any SummaryWriter, such as tensorboardX's."""

    def __init__(self, summary_writer: Any) -> None:
        self._summary_writer = summary_writer

    def scalars(self, scalars: dict[str, float], step: int) -> None:
        for tag, number in scalars.items():
            self._summary_writer.add_scalar(tag, number, step)

    def images(self, metrics: Sequence[str], snapshot: Snapshot) -> None:
        for metric in metrics:
            picture = render_heads(snapshot, metric)
            self._summary_writer.add_image(f"attnmon/heads/{metric}", picture, snapshot.step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        self._summary_writer.add_text(tag, text, step)


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", "TensorBoardWriter") from error
