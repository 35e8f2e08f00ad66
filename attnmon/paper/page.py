"""The page: one HTML file that needs no other, with figures inside."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2

from attnmon.paper.claims import Claim


@dataclass(frozen=True)
class Picture:
    """A figure as SVG, and what it shows in a sentence or two."""

    svg: str  # base64
    alt: str

    @classmethod
    def of(cls, svg: bytes, alt: str) -> Picture:
        """From the bytes of an SVG file."""
        return cls(base64.b64encode(svg).decode(), alt)


@dataclass(frozen=True)
class Section:
    """A heading, its figures, and a table of numbers to unfold."""

    title: str
    pictures: Sequence[Picture]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default=())
    open: bool = False


def render_page(
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    claims: Sequence[Claim],
    sections: Sequence[Section],
    files: str = "",
) -> str:
    """The whole page.

    Args:
        title: heading.
        lead: one paragraph below it.
        facts: (name, value), what was measured and how.
        claims: of the paper; () for none.
        sections: one an experiment.
        files: what else lies in the folder.
    """
    source = resources.files("attnmon.paper").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        title=title, lead=lead, facts=facts, claims=claims, sections=sections, files=files
    )


def number(value: Any) -> str:
    """A number as a table shows it."""
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
