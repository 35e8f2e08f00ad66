"""Alerts as plain text on a stream, and a short table of heads."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from attnmon.errors import AttnmonWarning
from attnmon.types import Alert, FloatArray, Snapshot
from attnmon.writers._describe import choices, pool, short_paths
from attnmon.writers.base import Writer

_DEFAULT_METRICS = ("entropy_norm", "separability", "effective_temperature", "max_logit", "jacobian_max")


class ConsoleWriter(Writer):
    """Prints every alert in two lines that begin with ``[attnmon] step``; writes no files.

    A stream that fails (closed, broken pipe) never stops training: the text is lost, the first failure is an
    AttnmonWarning, and later failures are silent. Where the stream's encoding lacks a character, it is escaped.

    Args:
        stream: where the text goes; None means ``sys.stderr``, looked up at each write.
        snapshots: whether to print one line for every snapshot, too.
        limit: most alerts printed per call; one line counts the others.
    """

    def __init__(self, stream: TextIO | None = None, *, snapshots: bool = False, limit: int = 20) -> None:
        self._stream = stream
        self._snapshots = snapshots
        self._limit = limit
        self._warned = False

    def write_snapshot(self, snapshot: Snapshot) -> None:
        if not self._snapshots:
            return
        means = []
        for metric in _DEFAULT_METRICS:
            pooled = pool(snapshot[metric]) if metric in snapshot else None
            if pooled is not None:
                means.append(f"{metric} {pooled.mean:.3g}")
        self._print(f"[attnmon] step {snapshot.step}: mean over heads: {', '.join(means) or 'no data'}\n")

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        text = "".join(_alert_lines(alert) + "\n" for alert in alerts[: self._limit])
        if len(alerts) > self._limit:
            text += f"[attnmon] ... and {len(alerts) - self._limit} more alerts\n"
        self._print(text)

    def write_text(self, text: str) -> None:
        """Print a text that is neither a snapshot nor an alert, such as the coverage table."""
        self._print(text if text.endswith("\n") else text + "\n")

    def _print(self, text: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        if stream is None:  # a process without a console (pythonw, some services)
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"attnmon could not print to the console ({type(error).__name__}: {error}); training goes on",
                    AttnmonWarning,
                    stacklevel=3,
                )


def _alert_lines(alert: Alert) -> str:
    """Format an alert as two lines: what happened where, then its message."""
    numbers = f"{alert.metric} = {_number(alert.value)}"
    if alert.baseline is not None:
        numbers += f", baseline {_number(alert.baseline)}"
    numbers += f", limit {_number(alert.threshold)}"
    return (
        f"[attnmon] step {alert.step} {alert.severity.upper()} {alert.rule}: "
        f"{alert.module} head {alert.head}: {numbers}\n"
        f"          {' '.join(alert.message.split())}"
    )


def heads_table(snapshot: Snapshot, metrics: Sequence[str] | None = None) -> str:
    """Return a plain-text table, one line per module: minimum, mean and maximum of each metric over the heads.

    Heads whose value is not finite are left out; "-" marks a module without any finite value. Lines below the table
    name the settings that a metric depends on (N, tokens, eps).

    Args:
        snapshot: the snapshot to show.
        metrics: columns of the table. None means those of ``entropy_norm``, ``separability``,
            ``effective_temperature``, ``max_logit`` and ``jacobian_max`` that the snapshot has.

    Raises:
        KeyError: a requested metric is not in the snapshot.
    """
    names = [name for name in _DEFAULT_METRICS if name in snapshot] if metrics is None else list(metrics)
    by_metric = [snapshot[name] for name in names]
    rows = [["module", *names], ["", *("min  mean   max" for _ in names)]]
    for path, short in zip(snapshot.modules, short_paths(snapshot.modules), strict=True):
        rows.append([short, *(_cell(by_path.get(path)) for by_path in by_metric)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(names) + 1)]
    lines = [
        (
            row[0].ljust(widths[0])
            + "".join("  " + text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        ).rstrip()
        for row in rows
    ]
    notes = [f"{name}: {text}" for name in names if (text := choices(name, snapshot.settings))]
    return "\n".join([f"attnmon: heads at step {snapshot.step}", *lines, *notes])


def _cell(values: FloatArray | None) -> str:
    pooled = None if values is None else pool({"": values})
    if pooled is None:
        return "-"
    return " ".join(_number(number).rjust(5) for number in (pooled.min, pooled.mean, pooled.max)).strip()


def _number(value: float) -> str:
    """Format a number in about five characters, to keep columns narrow; no data is "nan"."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.0e}"
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.095 else 3
    return f"{value:.{decimals}f}"
