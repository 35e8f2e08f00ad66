"""The page: one HTML file that needs no other, with figures inside."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from attnmon.paper.claims import Claim


@dataclass(frozen=True)
class Picture:
    """A figure as SVG, and what it shows.

    Attributes:
        svg: the bytes of the SVG file, in base64.
        alt: a sentence or two.

    Source: ours.
    """

    svg: str
    alt: str

    @classmethod
    def of(cls, svg: bytes, alt: str) -> Picture:
        """Make a picture from the bytes of an SVG file."""
        return cls(base64.b64encode(svg).decode(), alt)


@dataclass(frozen=True)
class Section:
    """A heading, its figures, and a table of numbers to unfold.

    Attributes:
        title: the heading.
        pictures: the figures.
        columns: of the table.
        rows: of the table, formatted; none leaves the table out.

    Source: ours.
    """

    title: str
    pictures: Sequence[Picture]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def render_page(
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    claims: Sequence[Claim],
    sections: Sequence[Section],
    files: str = "",
) -> str:
    """Render the whole page.

    Args:
        title: heading.
        lead: one paragraph below it.
        facts: (name, value), what was measured and how.
        claims: of the paper; () for none.
        sections: one for each experiment.
        files: what else lies in the folder.

    Returns:
        HTML.

    Source: ours.
    """
    source = resources.files("attnmon.paper").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        title=title, lead=lead, facts=facts, claims=claims, sections=sections, files=files
    )


def number(value: Any) -> str:
    """Format a number as a table shows it.

    Args:
        value: a float (NaN becomes "-"), a whole number, or a text, which stays as it is.

    Returns:
        At most four significant digits of a float, a whole number with thousands separated.

    Source: ours.
    """
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
