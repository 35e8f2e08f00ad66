"""Checks of a user's options, with one wording: what was expected, what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from attnmon.errors import AttnmonError


def check_whole(name: str, value: object, *, least: int = 1, none_means: str | None = None) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Args:
        name: of the option, as the user wrote it.
        none_means: what None stands for, where None is accepted.

    Raises:
        AttnmonError: it is none. A bool is none.
    """
    if value is None and none_means is not None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        also = f" or None ({none_means})" if none_means else ""
        raise AttnmonError(f"{name} must be a whole number of at least {least}{also}; got {value!r}")


def check_number(
    name: str,
    value: object,
    *,
    above: float = 0.0,
    below: float = math.inf,
    closed: bool = False,
    none_means: str | None = None,
) -> None:
    """Refuse what is not a finite number with above < value < below.

    Args:
        name: of the option, as the user wrote it.
        closed: ``below`` itself is accepted, too.
        none_means: what None stands for, where None is accepted.

    Raises:
        AttnmonError: it is none. A bool is none.
    """
    if value is None and none_means is not None:
        return
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
        if math.isfinite(number) and (above < number < below or (closed and number == below)):
            return
    upper = "" if math.isinf(below) else f" and {'<=' if closed else '<'} {below:g}"
    also = f" or None ({none_means})" if none_means else ""
    raise AttnmonError(f"{name} must be a finite number > {above:g}{upper}{also}; got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is not one of the names.

    Raises:
        AttnmonError: it is none; the message lists them.
    """
    if value not in choices:
        raise AttnmonError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
