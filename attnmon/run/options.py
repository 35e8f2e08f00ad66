"""The options of a monitor: their defaults, and all that can be checked of them before there is a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar

from attnmon.checks import check_choice, check_whole
from attnmon.errors import AttnmonError
from attnmon.rules import Rule, RuleSet
from attnmon.stats.api import resolve_backend
from attnmon.stats.settings import DEFAULTS as NUMBERS
from attnmon.stats.settings import Settings
from attnmon.types import Alert
from attnmon.writers import Writer

_Function = TypeVar("_Function", bound=Callable[..., Any])


class CallbackKeywords(TypedDict, total=False):
    """The options that a trainer's callback hands on to ``attnmon.watch`` as they are."""

    every_n_steps: int
    rows: int | None
    sequences: int | None
    top_n: int
    tokens: str
    fd_epsilon: float
    metrics: Iterable[str] | str | None
    include: Sequence[str] | str | None
    exclude: Sequence[str] | str | None
    rules: Iterable[Rule] | Rule | None
    on_alert: Callable[[Alert], None] | None
    backend: str
    on_error: str
    process_group: Any


class WatchKeywords(CallbackKeywords, total=False):
    """The options of ``attnmon.watch`` as a user may give them; ``attnmon.watch`` says what each means."""

    writers: Iterable[Writer] | Writer
    write_every_n_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """The options of ``attnmon.watch`` with their defaults, checked as far as that takes no model.

    Where one or several are accepted, one becomes a tuple, and so does what can be iterated over only once.

    Attributes:
        settings: what the numbers depend on, of these options.

    Raises:
        AttnmonError: says which option, what came and what is accepted.
    """

    every_n_steps: int = 1
    rows: int | None = NUMBERS.rows
    sequences: int | None = NUMBERS.sequences
    top_n: int = NUMBERS.top_n
    tokens: str = NUMBERS.tokens
    fd_epsilon: float = NUMBERS.fd_epsilon
    metrics: tuple[str, ...] | None = None
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    rules: tuple[Rule, ...] | None = None
    writers: tuple[Writer, ...] = ()
    on_alert: Callable[[Alert], None] | None = None
    backend: str = "auto"
    on_error: str = "warn"
    write_every_n_steps: int = 1
    process_group: Any = None
    settings: Settings = field(init=False, repr=False)

    def __post_init__(self) -> None:
        several = {"metrics": str, "rules": Rule, "include": str, "exclude": str, "writers": Writer}
        for name, kind in several.items():
            given = _as_tuple(name, getattr(self, name), kind)
            object.__setattr__(self, name, () if given is None and name == "writers" else given)
        for name in ("include", "exclude"):  # whether they match, only a model can tell
            patterns = getattr(self, name)
            if not all(isinstance(pattern, str) for pattern in patterns or ()):
                raise AttnmonError(f"{name} must be glob patterns on module paths, such as '*.attn'; got {patterns!r}")
        check_whole("every_n_steps", self.every_n_steps)
        check_whole("write_every_n_steps", self.write_every_n_steps)
        check_choice("on_error", self.on_error, ("warn", "raise"))
        if self.on_alert is not None and not callable(self.on_alert):
            raise AttnmonError(f"on_alert must be callable with one Alert; got {self.on_alert!r}")
        for writer in self.writers:
            if not isinstance(writer, Writer):
                raise AttnmonError(f"writers must be attnmon.writers.Writer objects; got {type(writer).__name__}")
        settings = Settings.create(
            metrics=self.metrics,
            rows=self.rows,
            sequences=self.sequences,
            top_n=self.top_n,
            tokens=self.tokens,
            fd_epsilon=self.fd_epsilon,
        )
        object.__setattr__(self, "settings", settings)
        resolve_backend(self.backend)
        RuleSet(self.rules)


DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(WatchOptions) if option.init}
"""Option -> what it is where nothing is said."""


def shows_options(*left_out: str) -> Callable[[_Function], _Function]:
    """A decorator: ``help`` and ``inspect.signature`` show each option that ``**options`` takes, with its default.

    Args:
        left_out: options of ``attnmon.watch`` that the function does not take.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        kept = [given for given in signature.parameters.values() if given.kind is not given.VAR_KEYWORD]
        taken = {*left_out, *signature.parameters}
        for name, default in DEFAULTS.items():
            if name not in taken:
                annotation = WatchKeywords.__annotations__[name].__forward_arg__  # as it is written above
                kept.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
                )
        function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return function

    return decorate


def _as_tuple(name: str, given: Any, kind: type) -> Any:
    """An option that is one ``kind`` or an iterable of them (perhaps one that runs once), as a tuple; None stays None.

    Raises:
        AttnmonError: it is neither.
    """
    if given is None:
        return None
    if isinstance(given, kind):
        return (given,)
    try:
        return tuple(given)
    except TypeError:
        raise AttnmonError(f"{name} must be one {kind.__name__} or several; got {given!r}") from None
