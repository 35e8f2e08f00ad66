"""Functions replaced in every namespace that holds them, as after ``from package import function``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

_ORIGINALS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Stand-in -> what it calls: the function itself, or another monitor's stand-in."""

_IN_USE: weakref.WeakSet[Any] = weakref.WeakSet()


class Rebinding:
    """Replaces functions by stand-ins between ``install`` and ``remove``.

    Several monitors may replace the same function, each one's stand-in calling what it found, and may go in any
    order: what is put back is never a stand-in out of use.

    Args:
        find: the functions as they are at present (perhaps another monitor's stand-ins), by a key of the caller's.
        make: (key, function as it is) -> stand-in; called once for each function.
        wanted: which modules, by name, may be changed.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, Any]],
        make: Callable[[str, Any], Any],
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self._find, self._make, self._wanted = find, make, wanted
        self._stand_ins: dict[Any, Any] = {}  # by what they stand in for
        self._modules = -1  # how many were loaded when the places were looked for
        self._places: list[tuple[dict[str, Any], str]] = []
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []

    def install(self) -> None:
        """Replace them."""
        if self._changed:
            return
        present = self._find()
        is_new = False
        for key, function in present.items():
            if function not in self._stand_ins:
                stand_in = self._make(key, function)
                _ORIGINALS[stand_in] = function
                self._stand_ins[function] = stand_in
                is_new = True
        if is_new or len(sys.modules) != self._modules:
            self._places = _places(present.values(), self._wanted)
            self._modules = len(sys.modules)
        by_identity = {id(function): (function, self._stand_ins[function]) for function in present.values()}
        for namespace, name in self._places:
            found = by_identity.get(id(namespace.get(name)))
            if found is not None:
                function, stand_in = found
                namespace[name] = stand_in
                _IN_USE.add(stand_in)
                self._changed.append((namespace, name, function, stand_in))

    def remove(self) -> None:
        """Put each back, unless someone else has put something there meanwhile."""
        for stand_in in self._stand_ins.values():
            _IN_USE.discard(stand_in)
        for namespace, name, function, stand_in in self._changed:
            if namespace.get(name) is stand_in:
                namespace[name] = _standing(function)
        self._changed.clear()


def _standing(function: Any) -> Any:
    """The function, or the first behind it that is not a stand-in out of use."""
    while function in _ORIGINALS and function not in _IN_USE:
        function = _ORIGINALS[function]
    return function


def _places(functions: Any, wanted: Callable[[str], bool] | None) -> list[tuple[dict[str, Any], str]]:
    identities = {id(function) for function in functions}
    if not identities:
        return []
    places = []
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        module_name = str(namespace.get("__name__", ""))
        if not module_name.startswith("attnmon.") and (wanted is None or wanted(module_name)):
            places += [(namespace, name) for name, value in list(namespace.items()) if id(value) in identities]
    return places
