"""One writer that passes records on to several, so that a failure of one does not affect the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from attnmon.checks import check_choice
from attnmon.errors import AttnmonError, AttnmonWarning
from attnmon.types import Alert, Snapshot
from attnmon.writers.base import Writer

_MAX_CONSECUTIVE_FAILURES = 3
_METHODS = ("write_snapshot", "write_alerts", "flush", "close")


class FanOut(Writer):
    """Sends every record to every writer.

    A writer that raises does not keep the others from getting the record. With ``on_error="warn"``, the first failure
    of a writer is an AttnmonWarning, and a writer that fails three times in a row gets no more records; ``close`` still
    reaches it. A record that is written resets the count of failures in a row; a flush does not. With
    ``on_error="raise"`` no writer is switched off, and the first exception is raised once all writers have had the
    record.

    Args:
        writers: objects with the methods of ``Writer``.
        on_error: "warn" or "raise".

    Attributes:
        writers: the writers, in the order given.
        failures: number of exceptions so far, per writer.
        disabled: writers that get no more records.

    Raises:
        AttnmonError: ``on_error`` is neither "warn" nor "raise", or a writer lacks a method.
    """

    def __init__(self, writers: Iterable[Writer], *, on_error: str = "warn") -> None:
        check_choice("on_error", on_error, ("warn", "raise"))
        self.writers = tuple(writers)
        for writer in self.writers:
            missing = [name for name in _METHODS if not callable(getattr(writer, name, None))]
            if missing:
                raise AttnmonError(
                    f"a writer needs the methods {', '.join(_METHODS)}; {type(writer).__name__} lacks "
                    f"{', '.join(missing)}: derive it from attnmon.writers.Writer"
                )
        self._on_error = on_error
        self._failures = [0] * len(self.writers)
        self._in_a_row = [0] * len(self.writers)

    @property
    def failures(self) -> tuple[int, ...]:
        return tuple(self._failures)

    @property
    def disabled(self) -> tuple[Writer, ...]:
        return tuple(writer for index, writer in enumerate(self.writers) if self._is_disabled(index))

    def write_snapshot(self, snapshot: Snapshot) -> None:
        self._each("write a snapshot", lambda writer: writer.write_snapshot(snapshot), is_record=True)

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        if alerts:
            self._each("write alerts", lambda writer: writer.write_alerts(alerts), is_record=True)

    def flush(self) -> None:
        self._each("flush", lambda writer: writer.flush())

    def close(self) -> None:
        self._each("close", lambda writer: writer.close(), even_disabled=True)

    def _is_disabled(self, index: int) -> bool:
        return self._on_error == "warn" and self._in_a_row[index] >= _MAX_CONSECUTIVE_FAILURES

    def _each(
        self, action: str, call: Callable[[Writer], None], *, is_record: bool = False, even_disabled: bool = False
    ) -> None:
        first_error: Exception | None = None
        messages = []
        for index, writer in enumerate(self.writers):
            if self._is_disabled(index) and not even_disabled:
                continue
            try:
                call(writer)
            except Exception as error:
                first_error = first_error or error
                if self._failures[index] == 0:
                    messages.append(_message(writer, action, error))
                self._failures[index] += 1
                self._in_a_row[index] += 1
            else:
                if is_record:
                    self._in_a_row[index] = 0
        if first_error is not None and self._on_error == "raise":
            raise first_error
        # After the loop, because where warnings are errors a warning inside it would cut off the later writers.
        for message in messages:
            warnings.warn(message, AttnmonWarning, stacklevel=3)


def _message(writer: Writer, action: str, error: Exception) -> str:
    return (
        f"{type(writer).__name__} could not {action} ({type(error).__name__}: {error}); training and the other writers "
        f"go on. It is tried again, and switched off after {_MAX_CONSECUTIVE_FAILURES} failures in a row; further "
        "failures of it are counted silently."
    )
