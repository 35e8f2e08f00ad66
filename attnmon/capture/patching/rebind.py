"""Functions replaced in every namespace that holds them, as after ``from package import function``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from attnmon.capture.patching.standins import (
    activate_link,
    active_link,
    deactivate_link,
    loaded,
    namespace_of,
    stand_before,
)


class Rebinding:
    """Replaces functions by stand-ins between ``install`` and ``remove``.

    Other monitors may stand before the same functions (see ``standins``).

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
        self._loaded: tuple[int, str] | None = None  # what was imported when the places were looked for
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
                stand_before(stand_in, function)
                self._stand_ins[function] = stand_in
                is_new = True
        if is_new or loaded() != self._loaded:
            self._places = _places(present.values(), self._wanted)
            self._loaded = loaded()
        by_identity = {id(function): (function, self._stand_ins[function]) for function in present.values()}
        for namespace, name in self._places:
            found = by_identity.get(id(namespace.get(name)))
            if found is not None:
                function, stand_in = found
                namespace[name] = stand_in
                activate_link(stand_in)
                self._changed.append((namespace, name, function, stand_in))

    def remove(self) -> None:
        """Put each back, unless someone else has put something there meanwhile."""
        for stand_in in self._stand_ins.values():
            deactivate_link(stand_in)
        for namespace, name, function, stand_in in self._changed:
            if namespace.get(name) is stand_in:
                namespace[name] = active_link(function)
        self._changed.clear()


def _places(functions: Any, wanted: Callable[[str], bool] | None) -> list[tuple[dict[str, Any], str]]:
    identities = {id(function) for function in functions}
    if not identities:
        return []
    places = []
    for namespace in [namespace_of(module) for module in list(sys.modules)]:
        module_name = str(namespace.get("__name__", ""))
        if not module_name.startswith("attnmon.") and (wanted is None or wanted(module_name)):
            places += [(namespace, name) for name, value in list(namespace.items()) if id(value) in identities]
    return places
