"""The options of a monitor that can be checked before there is a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attnmon.errors import AttnmonError
from attnmon.rules import Rule, RuleSet
from attnmon.stats.api import resolve_backend
from attnmon.stats.settings import Settings, check_count
from attnmon.types import Alert
from attnmon.writers import Writer


def check_options(
    *,
    every_n_steps: int = 1,
    rows: int | None = 32,
    sequences: int | None = 4,
    top_n: int = 16,
    tokens: str = "value",
    fd_epsilon: float = 0.1,
    metrics: Iterable[str] | str | None = None,
    rules: Iterable[Rule] | None = None,
    writers: Iterable[Writer] | Writer = (),
    on_alert: Callable[[Alert], None] | None = None,
    backend: str = "auto",
    on_error: str = "warn",
    write_every_n_steps: int = 1,
    process_group: Any = None,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
) -> Settings:
    """Validate everything about a monitor's options that needs no model.

    Raises:
        AttnmonError: says which option, what came and what is accepted.
    """
    del process_group
    for name, patterns in (("include", include), ("exclude", exclude)):  # whether they match, only a model can tell
        if not all(isinstance(pattern, str) for pattern in as_tuple(name, patterns, str) or ()):
            raise AttnmonError(f"{name} must be glob patterns on module paths, such as '*.attn'; got {patterns!r}")
    check_count("every_n_steps", every_n_steps)
    check_count("write_every_n_steps", write_every_n_steps)
    if on_error not in ("warn", "raise"):
        raise AttnmonError(f"on_error must be 'warn' or 'raise'; got {on_error!r}")
    if on_alert is not None and not callable(on_alert):
        raise AttnmonError(f"on_alert must be callable with one Alert; got {on_alert!r}")
    for writer in as_tuple("writers", writers, Writer) or ():
        if not isinstance(writer, Writer):
            raise AttnmonError(f"writers must be attnmon.writers.Writer objects; got {type(writer).__name__}")
    settings = Settings.create(
        metrics=as_tuple("metrics", metrics, str),
        rows=rows,
        sequences=sequences,
        top_n=top_n,
        tokens=tokens,
        fd_epsilon=fd_epsilon,
    )
    resolve_backend(backend)
    RuleSet(as_tuple("rules", rules, Rule))
    return settings


def as_tuple(name: str, given: Any, kind: type) -> Any:
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
