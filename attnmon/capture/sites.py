"""Which modules of a model are watched, and what becomes known of them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence

from torch import nn

from attnmon.capture import modules as names
from attnmon.capture.coverage import CoverageRecord, Site
from attnmon.errors import AttnmonError

Watched = tuple[weakref.ref[nn.Module], Site]


def find_sites(
    model: nn.Module, include: Sequence[str] | str | None, exclude: Sequence[str] | str | None
) -> list[Watched]:
    """Every module that is attention or could make an attention call, in the model's order.

    Args:
        model: any module, wrapped or not.
        include, exclude: glob patterns on canonical paths; what they leave out is found all the same, as excluded.

    Raises:
        AttnmonError: no module of the model is or mentions attention, or a pattern matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise AttnmonError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    found = list(names.walk(model))
    attention = [path for path, module in found if names.looks_like_attention(module)]
    paths = attention or [path for path, module in found if names.mentions_attention(module)]
    if not paths:
        raise AttnmonError(
            f"found no attention in {type(model).__name__}: no module whose class name says attention and no forward "
            "that calls an attention function or a softmax; pass the module that holds the transformer"
        )
    include = names.check_patterns("include", include, [path for path, _ in found])
    exclude = names.check_patterns("exclude", exclude, [path for path, _ in found])
    if not any(names.selected(path, include, exclude) for path in paths):
        raise AttnmonError("include and exclude leave no attention module; there are: " + ", ".join(paths[:8]))
    watched = []
    for path, module in found:
        expected = names.looks_like_attention(module)
        if expected or names.may_call_attention(module):
            site = Site(path, names.kind_of(path, module), expected, heads_hint=names.head_count(module))
            site.excluded = not names.selected(path, include, exclude)
            site.depth = len(path.split(".")) if path else 0
            watched.append((weakref.ref(module), site))
    return watched


def coverage_of(sites: Sequence[Site], measured_steps: int) -> list[CoverageRecord]:
    """Records of the sites that are attention or were seen to make attention calls, in their order."""
    made_calls = [site.path for site in sites if site.calls or site.refused or site.left_alone]
    return [
        site.record(measured_steps)
        for site in sites
        # an attention module that only wraps another (a projection around it, say) is not a site of its own
        if site.calls
        or site.refused
        or (site.expected and not any(path.startswith(f"{site.path}.".lstrip(".")) for path in made_calls))
    ]


def by_name(path: str) -> list[str | int]:
    """A sorting key under which ``layers.2`` comes before ``layers.10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", path)]
