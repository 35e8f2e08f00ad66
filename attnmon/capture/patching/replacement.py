"""Functions that are replaced during a measured step by ones that call them and tell of the call."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from attnmon.call import CallArgs
from attnmon.capture.observe import CallInterceptor
from attnmon.capture.patching.links import activate_link, chain, deactivate_link, stand_before


class Replacement:
    """Stands in the place of ``original``; one object for all steps, since compiled graphs are valid for it alone.

    One that is out of use, but still called by another (see ``links``), passes the call on and tells nobody.

    Args:
        recorder: told of each call.
        route: how coverage calls it.
        original: what is called.
        describe: the arguments of a call as those of ``attnmon.call.make_call``.
        takes_module: whether the first argument, or ``module``, is the module that calls.
        opaque: torch calls inside are this call; otherwise they are watched, and ``describe`` is asked only where
            none was seen. A function decides by the keyword arguments.
    """

    def __init__(
        self,
        recorder: CallInterceptor,
        route: str,
        original: Callable[..., Any],
        describe: Callable[[tuple[Any, ...], Mapping[str, Any]], CallArgs],
        *,
        takes_module: bool = False,
        opaque: bool | Callable[[Mapping[str, Any]], bool] = True,
    ) -> None:
        functools.update_wrapper(self, original)
        self.recorder, self.route, self.original, self.describe = recorder, route, original, describe
        self.takes_module, self.opaque = takes_module, opaque

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = None
        if self.takes_module:
            module = args[0] if args else kwargs.get("module")
        return self.recorder.intercept(
            self.route,
            self.original,
            args,
            kwargs,
            self.describe,
            module,
            opaque=self.opaque if isinstance(self.opaque, bool) else self.opaque(kwargs),
        )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As an attribute of a class it binds as a function does."""
        return self if instance is None else types.MethodType(self, instance)

    # a model copied or saved in the middle of a step takes the function itself along

    def __copy__(self) -> Callable[..., Any]:
        return self.original

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return self.original

    def __reduce__(self) -> tuple[Any, ...]:
        return (copy.copy, (self.original,))  # which gives a function itself, and needs no attnmon


class Links:
    """The links of one monitor, by what they stand before and under which name."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Any] = {}
        self._own: set[int] = set()

    def put_before(
        self, function: Any, make: Callable[[Any, Any], Any], put: Callable[[Any], None], name: str = ""
    ) -> Any:
        """The link of ``function``, put where that is unless it stands behind it already.

        Args:
            make: from the function as it is now and the one at the end of the chain to a link.
            put: puts it there.
        """
        links = chain(function)
        for link in links[:-1]:
            if id(link) in self._own:
                activate_link(link)
                return link
        made = self._made.get((id(function), name))
        if made is None:
            made = self._made[id(function), name] = make(function, links[-1])
            self._own.add(id(made))
            stand_before(made, function)
        activate_link(made)
        put(made)
        return made

    def owns(self, function: Any) -> bool:
        """Whether this is one of them."""
        return id(function) in self._own

    def deactivate(self) -> None:
        """None of them is in use."""
        for made in self._made.values():
            deactivate_link(made)
