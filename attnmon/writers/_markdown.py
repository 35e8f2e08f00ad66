"""Markdown tables for TensorBoard's text page: alerts, and a legend of the metrics."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from attnmon.metrics import METRICS
from attnmon.types import Alert, Snapshot
from attnmon.writers._describe import choices

_COLUMNS = ("step", "severity", "rule", "layer", "head", "metric", "value", "baseline", "what to do")

# TensorBoard breaks words anywhere once a table is wider than the page, which leaves the narrow columns two letters
# wide; line breaks within the wide cells keep the table narrow.
_MESSAGE_WIDTH, _PATH_WIDTH, _LEGEND_WIDTH = 34, 24, 20


def alerts_table(alerts: Sequence[Alert], num_earlier: int = 0) -> str:
    """Return a Markdown table of alerts, in the order given.

    The column ``layer`` shows the module path; "-" stands for a baseline that the rule does not have.

    Args:
        alerts: the rows of the table.
        num_earlier: number of alerts that the table omits; a line below mentions them.
    """
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    for alert in alerts:
        cells = (
            str(alert.step),
            f"**{alert.severity}**" if alert.severity == "critical" else alert.severity,
            _code(alert.rule),
            _path(alert.module),
            str(alert.head),
            _code(alert.metric),
            _number(alert.value),
            _number(alert.baseline),
            _text(alert.message),
        )
        lines.append("| " + " | ".join(cells) + " |")
    if num_earlier:
        lines += ["", f"{num_earlier} earlier alert{'s' if num_earlier > 1 else ''} not shown."]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _code(name: str) -> str:
    """Return a code span, in which the underscores and stars of a path do not turn into emphasis."""
    return "`" + name.replace("`", "'") + "`"


def _path(path: str) -> str:
    """Return a path as code, on several lines if it is long; lines break before a dot."""
    lines = [""]
    for part in path.replace(".", "\n.").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > _PATH_WIDTH:
            lines.append("")
        lines[-1] += part
    return "<br>".join(map(_code, lines))


def _text(message: str, width: int = _MESSAGE_WIDTH) -> str:
    """Wrap and escape a text, so that one with "|" or "<" does not break the table."""
    return "<br>".join(map(_escape, textwrap.wrap(message, width)))


def _escape(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for character in "`*_|[]":
        text = text.replace(character, "\\" + character)
    return text


def legend(snapshot: Snapshot) -> str:
    """Return a Markdown table with formula, unit, range, choices and source of each metric, then all settings."""
    lines = ["| metric | of one row | unit | range | head's value | choices | source |", "|" + " --- |" * 7]
    for name in snapshot.metrics:
        info = METRICS.get(name)
        if info is not None:
            merge = {"mean": "mean of rows", "max": "max of rows", "inverse_mean": "1 / mean of rows"}[info.merge]
            cells = (info.formula, info.unit, info.value_range, merge, choices(name, snapshot.settings), info.source)
            lines.append(f"| {_code(name)} | " + " | ".join(_text(cell, _LEGEND_WIDTH) for cell in cells) + " |")
    settings = ", ".join(f"{name} = {value}" for name, value in snapshot.settings.items())
    return "\n".join([*lines, "", f"Settings: {_escape(settings)}"])
