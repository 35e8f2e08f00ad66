"""The options of a monitor: their defaults, and all that can be checked of them before there is a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from attnmon.errors import AttnmonError
from attnmon.rules import Rule, RuleSet
from attnmon.stats.api import resolve_backend
from attnmon.stats.settings import Settings, check_count
from attnmon.types import Alert
from attnmon.writers import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``attnmon.watch`` takes beside the model, and describes.

    Where one or several are accepted, one becomes a tuple, and so does what can be iterated over only once.

    Attributes:
        settings: what the numbers depend on, of these options.

    Raises:
        AttnmonError: says which option, what came and what is accepted.
    """

    every_n_steps: int = 1
    rows: int | None = 32
    sequences: int | None = 4
    top_n: int = 16
    tokens: str = "value"
    fd_epsilon: float = 0.1
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
        check_count("every_n_steps", self.every_n_steps)
        check_count("write_every_n_steps", self.write_every_n_steps)
        if self.on_error not in ("warn", "raise"):
            raise AttnmonError(f"on_error must be 'warn' or 'raise'; got {self.on_error!r}")
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


DEFAULTS: dict[str, Any] = {option.name: option.default for option in fields(Options) if option.init}
"""Option -> what it is where nothing is said."""


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
