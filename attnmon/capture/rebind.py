"""Functions replaced in every namespace that holds them, as after ``from package import function``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


class Rebinding:
    """Replaces functions by others between ``install`` and ``remove``.

    Args:
        find: the functions as they are now, each with the one to take its place; asked whenever modules were
            imported since the last time, so that a package imported later is found.
        wanted: which modules, by name, may be changed.
    """

    def __init__(self, find: Callable[[], Mapping[Any, Any]], wanted: Callable[[str], bool] | None = None) -> None:
        self._find = find
        self._wanted = wanted
        self._modules = -1  # how many were loaded when the places were looked for
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []

    def install(self) -> None:
        """Replace them."""
        if self._changed:
            return
        if len(sys.modules) != self._modules:
            self._places = _places(self._find(), self._wanted)
            self._modules = len(sys.modules)
        for place in self._places:
            namespace, name, original, replacement = place
            if namespace.get(name) is original:
                namespace[name] = replacement
                self._changed.append(place)

    def remove(self) -> None:
        """Put each back, unless someone else has put something there meanwhile."""
        for namespace, name, original, replacement in self._changed:
            if namespace.get(name) is replacement:
                namespace[name] = original
        self._changed.clear()


def _places(
    replaced: Mapping[Any, Any], wanted: Callable[[str], bool] | None
) -> list[tuple[dict[str, Any], str, Any, Any]]:
    by_identity = {id(original): (original, replacement) for original, replacement in replaced.items()}
    if not by_identity:
        return []
    places = []
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict):
            continue
        module_name = str(namespace.get("__name__", ""))
        if not module_name.startswith("attnmon.") and (wanted is None or wanted(module_name)):
            for name, value in list(namespace.items()):
                if id(value) in by_identity:
                    places.append((namespace, name, *by_identity[id(value)]))
    return places
