"""Faults of the monitor inside the user's training: told once, and never raised there unless asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from attnmon.errors import AttnmonError, AttnmonWarning

_MOST_WARNINGS = 1000


class Faults:
    """Where everything that goes wrong ends up.

    Args:
        on_error: "warn" or "raise".

    Attributes:
        refused_calls: a call was not measured since this was last set to False.
    """

    def __init__(self, on_error: str) -> None:
        self._raises = on_error == "raise"
        self._warned: set[str] = set()
        self.refused_calls = False

    def guard(self, action: Callable[[], Any]) -> None:
        """Run something of ours; it raises only with ``on_error="raise"``."""
        try:
            action()
        except Exception as error:
            if self._raises:
                raise
            kind = type(error).__name__
            self.warn_once(f"a fault inside the monitor ({kind}: {error}); training goes on", topic=f"fault {kind}")

    def call_not_measured(self, path: str, error: Exception, is_new: bool) -> None:
        """An attention call could not be measured.

        Args:
            path: of its module.
            error: why; AttnmonError where that is a refusal, not a fault.
            is_new: whether this is the module's first of its kind.
        """
        is_refusal = isinstance(error, AttnmonError)
        if self._raises and not is_refusal:
            raise error
        self.refused_calls = True
        if is_new:
            reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
            self.warn_once(
                f"{path or 'the model'}: an attention call is not measured: {reason}; "
                "further modules of which this holds are in monitor.coverage()",
                topic=reason if is_refusal else f"call {type(error).__name__}",
            )

    def warn_once(self, message: str, topic: str | None = None) -> None:
        """Warn, unless this topic (by default the message itself) was warned of before."""
        topic = topic or message
        if topic not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(topic)
            warnings.warn(f"attnmon: {message}", AttnmonWarning, stacklevel=3)
