"""Functions that stand before others, and who holds functions.

Several monitors may stand before the same function, each one's stand-in calling the next, and may go in any order:
what is put back is never a stand-in out of use.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

_ORIGINALS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Stand-in -> what it calls: the function itself, or another monitor's stand-in."""

_IN_USE: weakref.WeakSet[Any] = weakref.WeakSet()


def stand_before(stand_in: Any, function: Any) -> None:
    """Note that ``stand_in`` calls ``function``."""
    _ORIGINALS[stand_in] = function


def activate_link(stand_in: Any) -> None:
    """It is in use from now on."""
    _IN_USE.add(stand_in)


def deactivate_link(stand_in: Any) -> None:
    """It is out of use, though another's may call it still."""
    _IN_USE.discard(stand_in)


def active_link(function: Any) -> Any:
    """The function, or the first behind it that is not a stand-in out of use."""
    while _stands_in(function) and function not in _IN_USE:
        function = _ORIGINALS[function]
    return function


def chain(function: Any) -> list[Any]:
    """The function and all that stand behind it; the last is no stand-in."""
    links = [function]
    while _stands_in(links[-1]):
        links.append(_ORIGINALS[links[-1]])
    return links


def _stands_in(function: Any) -> bool:
    try:
        return function in _ORIGINALS
    except TypeError:  # a callable without a hash
        return False


def loaded() -> tuple[int, str]:
    """Changes when a module is imported."""
    return len(sys.modules), next(reversed(sys.modules))


def namespace_of(module: str) -> dict[str, Any]:
    """The globals of a module, empty if it was not imported or has none to change."""
    found = getattr(sys.modules.get(module), "__dict__", None)
    return found if type(found) is dict else {}
