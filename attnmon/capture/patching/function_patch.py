"""Functions replaced wherever they are held: in namespaces, after ``from package import function``, and in tables."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from attnmon.capture.patching.links import (
    ORIGINALS,
    activate_link,
    active_link,
    bottom_id,
    chain,
    deactivate_link,
    loaded,
    namespace_of,
    stand_before,
)


class FunctionPatch:
    """Stands before functions between ``install`` and ``remove``; see ``attnmon.capture.observe.Patch``.

    Other monitors may stand before the same functions (see ``links``). A subclass says which functions these are,
    makes the links, and may name further places.
    """

    late_binders: tuple[str, ...] = ()
    """Modules that may take hold of a function in the middle of a step, without an import."""

    def __init__(self) -> None:
        self._links = Links()
        self._known: dict[int, str] = {}  # names of the functions, by identity
        self._loaded: tuple[int, str] | None = None  # what was imported when the bindings were looked for
        self._bindings: list[Binding] = []

    def functions(self) -> Iterable[tuple[str, Any]]:
        """(name, function as its package holds it now, perhaps with links before it)."""
        raise NotImplementedError

    def make(self, name: str, current: Any, bottom: Any) -> Any:
        """A link that calls ``current``; ``bottom`` is the function at the end of its chain."""
        raise NotImplementedError

    def further(self, wanted: set[int], holders: Mapping[str, dict[str, Any]]) -> Iterator[Binding]:
        """Bindings outside of modules' namespaces.

        Args:
            wanted: identities of the functions and of links before them.
            holders: namespaces of the modules, by name, that hold some of them.
        """
        yield from ()

    def install(self) -> None:
        """Put a link before each."""
        known = {id(chain(function)[-1]): name for name, function in self.functions()}
        if not known:
            return
        if known != self._known or loaded() != self._loaded:
            self._known, self._loaded = known, loaded()
            wanted = set(known) | {id(link) for link in list(ORIGINALS) if bottom_id(link) in known}
            self._bindings = list(self._search(wanted))
        for binding in self._bindings:
            function = binding.get()
            if not callable(function) or bottom_id(function) not in self._known:
                continue  # something else is there by now
            self._links.put_before(binding, self._make)

    def remove(self) -> None:
        """Put each back, unless someone else has put something there meanwhile."""
        self._links.restore()
        if self._known:
            self._clear_late_bindings()

    def _make(self, current: Any, bottom: Any) -> Any:
        return self.make(self._known[bottom_id(bottom)], current, bottom)

    def _clear_late_bindings(self) -> None:
        """Modules that imported a function during the step hold the link."""
        names = list(sys.modules) if loaded() != self._loaded else self.late_binders
        for namespace in (namespace_of(name) for name in names):
            for name, value in list(namespace.items()):
                if self._links.owns(value):
                    namespace[name] = active_link(value)

    def _search(self, wanted: set[int]) -> Iterator[Binding]:
        holders = {}
        for module in list(sys.modules):
            namespace = namespace_of(module)
            if str(namespace.get("__name__", "")).startswith("attnmon."):
                continue
            found = list(names_of(wanted, namespace))
            if found:
                holders[module] = namespace
            yield from (Binding(namespace, name) for name in found)
        yield from self.further(wanted, holders)


class Links:
    """The links of one monitor, by what they stand before and under which name, and where they are."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Any] = {}
        self._own: set[int] = set()
        self._placed: list[tuple[Binding, Any]] = []

    def put_before(self, binding: Binding, make: Callable[[Any, Any], Any], name: str = "") -> None:
        """Put a link where a function is held, unless one of these stands behind that function already.

        Args:
            binding: where it is held.
            make: from the function as it is now and the one at the end of the chain to a link.
            name: tells links of one function apart.
        """
        function = binding.get()
        links = chain(function)
        made = next((link for link in links[:-1] if id(link) in self._own), None)
        if made is None:
            made = self._made.get((id(function), name))
            if made is None:
                made = self._made[id(function), name] = make(function, links[-1])
                self._own.add(id(made))
                stand_before(made, function)
            binding.put(made)
        activate_link(made)
        self._placed.append((binding, made))

    def owns(self, function: Any) -> bool:
        """Whether this is one of them."""
        return id(function) in self._own

    def restore(self) -> None:
        """Put each function back, unless someone else has put something there meanwhile; no link is in use."""
        for made in self._made.values():
            deactivate_link(made)
        while self._placed:
            binding, link = self._placed.pop()
            if binding.get() is link:
                binding.put(active_link(link))


class Binding:
    """Where a function is held: a namespace or table, a class, or a module (which it does not keep alive)."""

    def __init__(self, owner: dict[Any, Any] | type | weakref.ref[nn.Module], name: Any) -> None:
        self._owner, self._name = owner, name
        value = self._namespace().get(name)
        while isinstance(value, _Static):
            value = value.before
        self._static = value if isinstance(value, staticmethod) else None  # as it was

    def get(self) -> Any:
        """What is held there now."""
        value = self._namespace().get(self._name)
        return value.__func__ if isinstance(value, staticmethod) else value

    def put(self, function: Any) -> None:
        """Hold something else there."""
        if self._static is not None:
            function = self._static if function is self._static.__func__ else _Static(function, self._static)
        if isinstance(self._owner, type):
            setattr(self._owner, self._name, function)
        else:
            namespace = self._namespace()
            if self._name in namespace:
                namespace[self._name] = function

    def _namespace(self) -> Any:
        if isinstance(self._owner, dict):
            return self._owner
        owner = self._owner() if isinstance(self._owner, weakref.ref) else self._owner
        return {} if owner is None else vars(owner)


class _Static(staticmethod):  # type: ignore[type-arg]
    """A replacement in the place of a static method, which it keeps."""

    def __init__(self, function: Callable[..., Any], before: Any) -> None:
        super().__init__(function)
        self.before = before


def names_of(wanted: set[int], namespace: Mapping[Any, Any]) -> Iterator[Any]:
    """Names under which a wanted function is held, as it is, with some arguments given, or as a static method.

    Types are compared, since some objects do things when asked what they are an instance of.
    """
    for name, value in list(namespace.items()):
        if type(value) is functools.partial:
            value = value.func
        elif type(value) is staticmethod or type(value) is _Static:
            value = value.__func__
        if id(value) in wanted:
            yield name
