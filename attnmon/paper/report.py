"""Finished units -> tables, figures and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attnmon.paper import figures
from attnmon.paper.claims import claims
from attnmon.paper.model import Subject
from attnmon.paper.options import PaperOptions
from attnmon.paper.page import Picture, Section, number, render_page
from attnmon.paper.store import Record, Store, write_atomic, write_table
from attnmon.paper.summary import HEAD, critical_points, curve, fit_line, merge_chunks, separation_tests

PAGE = "paper.html"

_SETTINGS = {
    "distance-length": ("length", "top_n"),
    "distance-topn": ("length", "top_n"),
    "critical-n": ("length", "top_n"),
    "separability": ("length", "top_n"),
    "sensitivity": ("length", "temperature", "epsilon"),
    "normalizers": ("length", "normalizer", "sums_to_one", "entropy_of"),
}


def write_report(subject: Subject, options: PaperOptions, store: Store) -> list[Path]:
    """Write everything that finished units allow.

    Args:
        subject: for the page's head.
        options: whose experiments, lengths and chunks are finished.
        store: where they are and where the report goes.

    Returns:
        The files, the page last.

    Raises:
        AttnmonError: a file cannot be written.

    Source: paper, experiments 1 to 5; the layout of the page is ours.
    """
    written: list[Path] = []
    merged: dict[str, list[Record]] = {}
    empty: list[str] = []
    for name in options.experiments:
        records = [
            record
            for chunk in range(options.chunks)
            for length in options.lengths_of(name)
            for record in store.load(name, length, chunk)
        ]
        written += write_table(store.out, name, records)
        if not any(record["rows"] for record in records):
            empty.append(name)
            continue
        merged[name] = merge_chunks(records, ("experiment", *_SETTINGS[name], *HEAD))
    tests = separation_tests(merged["critical-n"], options.level) if "critical-n" in merged else []
    if tests:
        written += write_table(store.out, "critical-n-tests", tests)
    sections = []
    for name, records in merged.items():
        section, files = _section(name, records, tests, options, store.out)
        sections.append(section)
        written += files
    facts = _facts(subject, options, merged)
    if empty:
        facts.append(("left out", f"{', '.join(empty)}: no row sees more than N keys"))
    page = render_page(
        "Limitations of normalization in attention: the paper's experiments on this model",
        "Each experiment of arXiv 2508.17821, repeated on the model and text named here. Numbers of the paper are from "
        "GPT-2 124M on War and Peace; a difference is no error on either side.",
        facts,
        claims(merged, tests),
        sections,
        f"Tables of every head and chunk ({', '.join(f'{name}.csv' for name in options.experiments)}"
        f"{', critical-n-tests.csv' if tests else ''}), figures under figures/, finished units under units/.",
    )
    write_atomic(store.out / PAGE, page)
    return [*written, store.out / PAGE]


def save_figure(folder: Path, name: str, figure: Figure, alt: str) -> tuple[Picture, list[Path]]:
    """Save a figure as PNG and SVG, and make it a picture of the page.

    Args:
        folder: where to; made if it is not there.
        name: of the files, without a suffix.
        figure: what to save.
        alt: what it shows, in words.

    Returns:
        The picture and the files.

    Raises:
        AttnmonError: a file cannot be written.

    Source: ours.
    """
    folder.mkdir(exist_ok=True)
    paths = []
    for kind in ("png", "svg"):
        data = figures.render(figure, kind)
        paths.append(folder / f"{name}.{kind}")
        write_atomic(paths[-1], data)
    return Picture.of(data, alt), paths


def _section(
    name: str, records: Sequence[Record], tests: Sequence[Record], options: PaperOptions, out: Path
) -> tuple[Section, list[Path]]:
    make = _SECTIONS[name]
    title, figure, alt, columns, rows = make(records, tests, options)
    picture, files = save_figure(out / "figures", name, figure, alt)
    shown = [[number(cell) for cell in row] for row in rows]
    return Section(title, [picture], columns, shown), files


_Made = tuple[str, Figure, str, Sequence[str], Sequence[Sequence[Any]]]


def _over_length(records: Sequence[Record], tests: Sequence[Record], options: PaperOptions) -> _Made:
    top_n = options.length_top_n
    return (
        "1. Distance against length",
        figures.distances(records, "length", f"Distance against L at N = {top_n}"),
        f"Distance d~ of the N = {top_n} largest weights, its bound and the expectation over random sets of N keys, "
        "against the number of tokens read. Lines are means over heads, bands the middle half of the heads.",
        *_distance_rows(records, "length", "L"),
    )


def _over_top_n(records: Sequence[Record], tests: Sequence[Record], options: PaperOptions) -> _Made:
    return (
        "2. Distance against N",
        figures.distances(records, "top_n", f"Distance against N at L = {options.longest}"),
        f"The same three against N at L = {options.longest}.",
        *_distance_rows(records, "top_n", "N"),
    )


def _distance_rows(records: Sequence[Record], x: str, label: str) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    names = ("distance", "bound", "expected", "expected_se", "expected_main_term", "expected_residual_bound")
    curves = [curve(records, x, name) for name in (*names, "expected_limit")]
    columns = (label, "d~", "bound", "E[d~], Monte Carlo", "its standard error (a head)", "main term of E")
    rows = [[int(point), *(float(found.mean[index]) for found in curves)] for index, point in enumerate(curves[0].x)]
    return (*columns, "bound of what it lacks", "limit of E"), rows


def _critical(records: Sequence[Record], tests: Sequence[Record], options: PaperOptions) -> _Made:
    x, y, none_at = critical_points(tests)
    shown = [test for test in tests if test["critical"]]
    rows = [[test["length"], test["top_n"], test["top_n"] / test["length"], test["p_value"]] for test in shown]
    return (
        "3. Critical N",
        figures.critical((x, y), fit_line(x, y), none_at, options.level),
        "The first N of a list at which a two-sample Kolmogorov-Smirnov test over heads no longer tells the distances "
        f"of the N largest weights from their expectation over random sets (level {options.level:g}).",
        ("L", "critical N", "N / L", "p-value there"),
        rows,
    )


def _separability(records: Sequence[Record], tests: Sequence[Record], options: PaperOptions) -> _Made:
    names = ("separability", "lower_bound", "paper_expression", "precision", "f_score", "margin", "retained_mass")
    curves = [curve(records, "top_n", name) for name in names]
    rows = [
        [int(n), float(np.nanmedian(curves[0].heads[i])), *(float(found.mean[i]) for found in curves)]
        for i, n in enumerate(curves[0].x)
    ]
    columns = (
        "N",
        "N_s/N, median",
        "mean",
        "lower bound",
        figures.NOT_A_BOUND,
        "precision",
        "F",
        "margin",
        "mass kept",
    )
    return (
        "4. Separability",
        figures.separability(records),
        f"Share of the N selected keys nearer to their sum than every other key, at L = {options.longest}: boxes over "
        "heads. The lower bound is averaged over rows with 0 where it is negative and says nothing. The dotted line is "
        "the paper's upper expression, which is not a bound.",
        columns,
        rows,
    )


def _sensitivity(records: Sequence[Record], tests: Sequence[Record], options: PaperOptions) -> _Made:
    epsilons = sorted({record["epsilon"] for record in records})
    columns = ["T", *(f"g, eps = {epsilon:g}" for epsilon in epsilons), "spectral norm", "its largest row", "1/(2T)"]
    rows = []
    for temperature in sorted({record["temperature"] for record in records}):
        here = [record for record in records if record["temperature"] == temperature]
        g = [max(record["g"] for record in here if record["epsilon"] == epsilon) for epsilon in epsilons]
        norm, largest = max(record["jacobian"] for record in here), max(record["jacobian_max"] for record in here)
        rows.append([temperature, *g, norm, largest, 0.5 / temperature])
    return (
        "5. Gradient sensitivity",
        figures.sensitivity(records),
        "Finite-difference sensitivity g(T, eps) along one random direction a row, and the exact spectral norm of the "
        f"softmax Jacobian, at L = {options.longest}: means over rows, the largest over heads. Dashed: the true bound.",
        columns,
        rows,
    )


def _normalizers(records: Sequence[Record], tests: Sequence[Record], options: PaperOptions) -> _Made:
    names = ("weight_sum", "support", "entropy", "entropy_norm", "jacobian")
    rows = []
    for name in dict.fromkeys(record["normalizer"] for record in records):
        of_name = [record for record in records if record["normalizer"] == name]
        means = [float(np.nanmean([record[column] for record in of_name])) for column in names]
        largest = max(record["jacobian_max"] for record in of_name)
        sums = "yes" if of_name[0]["sums_to_one"] else "no"
        rows.append([name, sums, *means, largest, of_name[0]["entropy_of"]])
    columns = ("sums to one", "sum of weights", "share of keys with weight", "entropy", "over its largest value")
    return (
        "Other normalizers on the same logits",
        figures.normalizers(records),
        f"What other normalizers make of the same logits, at L = {options.longest}: a mark a head, mean over rows. "
        "The Jacobian's spectral norm is exact.",
        ("normalizer", *columns, "Jacobian norm", "its largest row", "entropy of"),
        rows,
    )


_SECTIONS: Mapping[str, Callable[[Sequence[Record], Sequence[Record], PaperOptions], _Made]] = {
    "distance-length": _over_length,
    "distance-topn": _over_top_n,
    "critical-n": _critical,
    "separability": _separability,
    "sensitivity": _sensitivity,
    "normalizers": _normalizers,
}

_TOKENS = {
    "value": "each head's value vectors, unit length",
    "value_raw": "each head's value vectors as they are",
    "hidden": "the hidden states that enter the module, unit length",
}


def _facts(subject: Subject, options: PaperOptions, merged: Mapping[str, Sequence[Record]]) -> list[tuple[str, str]]:
    heads = {tuple(record[key] for key in HEAD) for records in merged.values() for record in records}
    layers = {layer for layer, *_ in heads}
    return [
        ("model", f"{subject.name}: {len(layers)} attention layers, {len(heads)} heads"),
        ("text", f"{options.text_name}; {subject.reading}"),
        ("read", f"{options.chunks} consecutive chunks of {options.longest} tokens; L = {_listed(options.lengths)}"),
        ("vectors x", f"{_TOKENS[options.tokens]} (the paper does not name the layer)"),
        ("rows", "every row that sees more than N keys; masked keys are no part of a row"),
        ("random sets", f"{options.draws} a row and N, seed {options.seed}"),
    ]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
