"""The figures, in the layout of the paper's. Nothing that is false as printed is labeled a bound."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnmon.paper.store import Record
from attnmon.paper.summary import Curve, Line, curve
from attnmon.theory.jacobian import finite_difference_bound, paper_expression

_DISTANCE_COLOR, _BOUND_COLOR, _EXPECTED_COLOR, _PAPER_COLOR = "#0072b2", "#444444", "#d55e00", "#999999"
_EPSILON_COLORS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7")
NOT_A_BOUND = "the paper's expression (not a bound)"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "attnmon",  # equal figures are equal files
}


def distances(records: Sequence[Record], x: str, title: str) -> Figure:
    """Draw d~ of the N largest weights, its bound and the expectation over random sets, against L or N.

    Args:
        records: of experiment 1 or 2, merged over chunks.
        x: "length" or "top_n".
        title: of the figure.

    Returns:
        The figure, not yet rendered.

    Source: paper, experiments 1 and 2, Theorem 1.
    """
    figure, axes = _axes(title, "L, tokens read" if x == "length" else "N, size of the selected set", "distance")
    for name, label, color, style in (
        ("bound", "bound of Theorem 1 (top-N sets)", _BOUND_COLOR, "--"),
        ("distance", "N largest weights, $\\tilde{d}$", _DISTANCE_COLOR, "-"),
        ("expected", "N random keys, E[$\\tilde{d}$]", _EXPECTED_COLOR, "-"),
    ):
        _band(axes, curve(records, x, name), label, color, style)
    if x == "length":
        _spaced_lengths(axes, curve(records, x, "distance").x)
    else:
        _marked(axes, records, x)
    axes.set_ylim(bottom=0)
    axes.legend(title="mean over heads; shaded: middle half", alignment="left", title_fontsize=9)
    return figure


def critical(points: tuple[Any, Any], line: Line | None, none_at: Sequence[int], level: float) -> Figure:
    """Draw critical N against L, with a fitted line.

    Args:
        points: L and critical N, float64 [points] each.
        line: fitted to them, or None.
        none_at: lengths at which no N was critical.
        level: of the test, for the legend.

    Returns:
        The figure, not yet rendered.

    Source: paper, experiment 3.
    """
    figure, axes = _axes("Critical N against L", "L, tokens read", "critical N")
    x, y = points
    axes.plot(
        x,
        y,
        "o",
        color=_DISTANCE_COLOR,
        label=f"first N not separated (KS test, level {level:g})",
        markersize=7,
        zorder=3,
    )
    if len(x):
        ends = np.array([0.0, max(*x, *none_at, 1)])
        axes.plot(ends, 0.06 * ends, ":", color=_PAPER_COLOR, label="the paper's observation on GPT-2: 0.06 L")
        if line is not None:
            sign = "+" if line.intercept >= 0 else "-"
            label = f"fitted line: {line.slope:.3f} L {sign} {abs(line.intercept):.1f}"
            axes.plot(ends, line.slope * ends + line.intercept, "-", color=_EXPECTED_COLOR, label=label)
    if none_at:
        axes.plot(
            none_at, [0.0] * len(none_at), "x", color=_BOUND_COLOR, label="no N up to L/2 (drawn at 0)", markersize=7
        )
    axes.set_ylim(bottom=min(0.0, *axes.get_ylim()))
    axes.set_xlim(left=0, right=1.05 * axes.get_xlim()[1])
    axes.legend()
    return figure


def separability(records: Sequence[Record]) -> Figure:
    """Draw N_s / N against N: boxes over heads, the lower bound, and the paper's upper expression.

    Args:
        records: of experiment 4, merged over chunks.

    Returns:
        The figure, not yet rendered.

    Source: paper, experiment 4, Theorem 2; its upper expression is labeled as no bound.
    """
    figure, axes = _axes("Separability against N", "N, size of the selected set", "$N_s$ / N")
    found = curve(records, "top_n", "separability")
    places = np.arange(len(found.x))
    boxes = axes.boxplot(
        [heads[np.isfinite(heads)] for heads in found.heads],
        positions=list(places),
        widths=0.5,
        patch_artist=True,
        manage_ticks=False,
        medianprops={"color": "black"},
        flierprops={"marker": ".", "markersize": 4, "markeredgecolor": "#777777"},
    )
    for box in boxes["boxes"]:
        box.set(facecolor="#a9cbe4", edgecolor=_DISTANCE_COLOR)
    boxes["boxes"][0].set_label("heads (box: middle half, line: median)")
    lower = curve(records, "top_n", "lower_bound").mean
    axes.plot(places, lower, "v--", color=_BOUND_COLOR, label="lower bound of Theorem 2, mean over heads")
    expression = curve(records, "top_n", "paper_expression").mean
    axes.plot(places, expression, "^:", color=_PAPER_COLOR, label=NOT_A_BOUND)
    axes.axhspan(0.70, 0.85, color="#f0e442", alpha=0.25, lw=0, label="the paper's observation for N >= 16: 0.70-0.85")
    axes.set_xticks(places, [f"{n:g}" for n in found.x])
    axes.set_ylim(min(-0.05, float(np.nanmin(lower)) * 1.05), 1.08)
    if float(np.nanmin(lower)) < -0.5:  # far below 0 the lower bound says nothing, and would flatten the boxes
        axes.set_ylim(-0.5, 1.08)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def sensitivity(records: Sequence[Record]) -> Figure:
    """Draw g(T, eps), the largest head's, against T on logarithmic axes, with the true bound.

    Args:
        records: of experiment 5, merged over chunks.

    Returns:
        The figure, not yet rendered.

    Source: paper, experiment 5; the bound and the exact norm are ours.
    """
    figure, axes = _axes("Finite-difference sensitivity g(T, eps)", "T (1 is standard scaled attention)", "g")
    epsilons = sorted({record["epsilon"] for record in records})
    temperatures = np.array(sorted({record["temperature"] for record in records}))
    for epsilon, color in zip(epsilons, _EPSILON_COLORS, strict=False):
        of_epsilon = [record for record in records if record["epsilon"] == epsilon]
        found = curve(of_epsilon, "temperature", "g")
        axes.plot(found.x, np.nanmax(found.heads, axis=1), "o-", color=color, label=f"eps = {epsilon:g}")
        bound = [finite_difference_bound(temperature, epsilon) for temperature in temperatures]
        label = "bound min(1/(2T), sqrt(2)/eps), by color" if epsilon == epsilons[-1] else None
        axes.plot(temperatures, bound, "--", color=color, linewidth=1.2, label=label)
    first = [record for record in records if record["epsilon"] == epsilons[0]]
    norm = np.nanmax(curve(first, "temperature", "jacobian").heads, axis=1)
    axes.plot(temperatures, norm, "s-", color=_BOUND_COLOR, label="exact spectral norm, mean over rows", markersize=3)
    axes.plot(
        temperatures,
        [paper_expression(temperature) for temperature in temperatures],
        ":",
        color=_PAPER_COLOR,
        label="min(1/(4T), sqrt(2)): false as printed, not a bound",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(title="largest over heads of the mean over rows", alignment="left", title_fontsize=9, fontsize=9)
    return figure


def normalizers(records: Sequence[Record]) -> Figure:
    """Draw Jacobian norm against entropy of each normalizer on the same logits, one mark a head.

    Args:
        records: of the experiment "normalizers", merged over chunks.

    Returns:
        The figure, not yet rendered.

    Source: ours.
    """
    figure, axes = _axes("Other normalizers on the same logits", "entropy, nats", "spectral norm of the Jacobian")
    names = list(dict.fromkeys(record["normalizer"] for record in records))
    colors = matplotlib.colormaps["tab10"]
    for number, name in enumerate(names):
        of_name = [record for record in records if record["normalizer"] == name]
        axes.plot(
            [record["entropy"] for record in of_name],
            [record["jacobian"] for record in of_name],
            "os^Dv<>Ph*"[number % 10],
            color=colors(number % 10),
            label=name,
            alpha=0.75,
            linestyle="none",
        )
    axes.set_yscale("log", nonpositive="clip")
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def render(figure: Figure, kind: str) -> bytes:
    """Render a figure to the bytes of a file, without a date, so that equal figures are equal files.

    Args:
        figure: what to render.
        kind: "png" or "svg".

    Returns:
        The bytes of the file.

    Source: ours.
    """
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """Make an empty figure in the common style."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.0, 4.8), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", fontsize=13)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return figure, axes


def _band(axes: Axes, found: Curve, label: str, color: str, style: str) -> None:
    axes.plot(found.x, found.mean, style, marker="o", color=color, label=label)
    axes.fill_between(found.x, found.low, found.high, color=color, alpha=0.12, lw=0)


def _spaced_lengths(axes: Axes, lengths: Iterable[float]) -> None:
    """Put ticks at the lengths, without those that would overlap, on the linear scale that a straight line needs."""
    ordered = sorted(lengths, reverse=True)
    shown: list[float] = []
    for length in ordered:
        if not shown or shown[-1] - length >= 0.05 * ordered[0]:
            shown.append(length)
    axes.set_xticks(shown, [f"{length:g}" for length in shown])
    axes.set_xlim(left=0)


def _marked(axes: Axes, records: Sequence[Record], x: str) -> None:
    places = sorted({record[x] for record in records})
    axes.set_xscale("symlog", linthresh=max(1, places[0]))
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def lines_over_steps(
    steps: Sequence[int], heads: Mapping[tuple[str, int], Sequence[float]], title: str, *, log: bool
) -> Figure:
    """Draw a panel for each module and a line for each head over training steps; all panels share their axes.

    Args:
        steps: of the snapshots.
        heads: (module, head) -> values at the steps, NaN where there is none.
        title: of the figure.
        log: a logarithmic axis where the values spread enough to need one.

    Returns:
        The figure, not yet rendered.

    Source: ours.
    """
    modules = list(dict.fromkeys(module for module, _ in heads))
    finite = [value for values in heads.values() for value in values if value > 0]
    spread = log and bool(finite) and max(finite) > 5.0 * min(finite)
    columns = min(3, len(modules)) if len(modules) != 4 else 2
    height = -(-len(modules) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.2 * columns + 0.6, 2.6 * height + 0.8), layout="constrained")
        panels = figure.subplots(height, columns, squeeze=False, sharex=True, sharey=True)
        figure.suptitle(title, x=0.02, ha="left", fontsize=13)
        most = max(head for _, head in heads) + 1
        colors = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.9, most))
        for axes, module in zip(panels.flat, modules, strict=False):
            axes.set_title(module or "model", fontsize=10, loc="left")
            for (of_module, head), values in heads.items():
                if of_module == module:
                    marker = "o" if len(steps) == 1 else None
                    axes.plot(steps, values, color=colors[head], linewidth=1.2, marker=marker, label=f"head {head}")
            if spread:
                axes.set_yscale("log")
        for axes in panels.flat[len(modules) :]:
            axes.set_axis_off()
        for axes in panels[-1]:
            axes.set_xlabel("optimizer step")
        if most <= 16:
            lines, labels = panels.flat[0].get_legend_handles_labels()
            figure.legend(lines, labels, loc="outside lower center", ncols=min(8, most), fontsize=9)
    return figure
