"""Functions that are replaced during a measured step by ones that call them and tell of the call."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from attnmon.call import CallArgs
from attnmon.capture.observe import CallInterceptor


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
