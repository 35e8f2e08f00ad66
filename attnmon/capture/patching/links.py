"""Links: functions that stand before others and call them, and who holds functions.

Several monitors may stand before the same function. Then each one's link calls the next, and they may go in any order:
what is put back is never a link out of use.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

ORIGINALS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Link -> what it calls: the function itself, or another monitor's link."""

_IN_USE: weakref.WeakSet[Any] = weakref.WeakSet()


def stand_before(link: Any, function: Any) -> None:
    """Note that ``link`` calls ``function``."""
    ORIGINALS[link] = function


def activate_link(link: Any) -> None:
    """The link is in use from now on."""
    _IN_USE.add(link)


def deactivate_link(link: Any) -> None:
    """The link is out of use, though another monitor's may still call it."""
    _IN_USE.discard(link)


def active_link(function: Any) -> Any:
    """The function, or the first behind it that is not a link out of use."""
    while _is_link(function) and function not in _IN_USE:
        function = ORIGINALS[function]
    return function


def chain(function: Any) -> list[Any]:
    """The function and all that stand behind it; the last is no link."""
    links = [function]
    while _is_link(links[-1]):
        links.append(ORIGINALS[links[-1]])
    return links


def _is_link(function: Any) -> bool:
    try:
        return function in ORIGINALS
    except TypeError:  # a callable without a hash
        return False


def bottom_id(function: Any) -> int:
    """Identity of the function at the end of the chain, arguments that were given before taken away."""
    bottom = chain(function)[-1]
    return id(chain(bottom.func)[-1] if type(bottom) is functools.partial else bottom)


def loaded() -> tuple[int, str]:
    """Changes when a module is imported."""
    return len(sys.modules), next(reversed(sys.modules))


def namespace_of(module: str) -> dict[str, Any]:
    """The globals of a module, empty if it was not imported or has none to change."""
    found = getattr(sys.modules.get(module), "__dict__", None)
    return found if type(found) is dict else {}
