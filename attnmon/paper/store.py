"""Finished units and tables on disk, every file of which is whole, so that a run that was stopped can go on.

A unit is one experiment at one length on one chunk of text; its numbers are one CSV file under ``units/``, written
aside and renamed. ``settings.json`` says what all units of the folder depend on.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnmon.errors import AttnmonError

Record = dict[str, Any]
"""One row of a tidy table: column -> text, whole number or float."""

SETTINGS = "settings.json"
UNITS = "units"
_TEXT_COLUMNS = ("experiment", "module", "normalizer", "entropy_of")  # never numbers, whatever they look like


class Store:
    """The units of one folder.

    Args:
        out: the folder; made if it is not there.
        settings: what numbers depend on, JSON-ready.
        restart: drop units that were made with other settings.

    Raises:
        AttnmonError: the folder holds units of other settings and ``restart`` is not set, or it cannot be written.

    Source: ours.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.out = out
        self._units = out / UNITS
        check_writable(out)
        before = self._settings_before()
        differences = [] if before is None else _differences(before, settings)
        if differences and not restart:
            raise AttnmonError(
                f"{out} holds results of other settings ({'; '.join(differences)}); choose another --out, or give "
                "--restart to drop them"
            )
        if differences:
            shutil.rmtree(self._units, ignore_errors=True)
        try:
            self._units.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AttnmonError(f"cannot write to --out {out}: {error.strerror}") from error
        write_atomic(out / SETTINGS, json.dumps(dict(settings), indent=1) + "\n")

    def has(self, experiment: str, length: int, chunk: int) -> bool:
        """Tell whether a unit is finished."""
        return self._path(experiment, length, chunk).exists()

    def save(self, experiment: str, length: int, chunk: int, records: Sequence[Record]) -> None:
        """Store a finished unit, as a whole or not at all.

        Raises:
            AttnmonError: the file cannot be written.
        """
        write_atomic(self._path(experiment, length, chunk), to_csv(records))

    def load(self, experiment: str, length: int, chunk: int) -> list[Record]:
        """Read the records of a finished unit."""
        return read_csv(self._path(experiment, length, chunk))

    def _path(self, experiment: str, length: int, chunk: int) -> Path:
        return self._units / f"{experiment}-L{length}-chunk{chunk}.csv"

    def _settings_before(self) -> dict[str, Any] | None:
        if not self._units.is_dir() or not any(self._units.iterdir()):
            return None
        try:
            before = json.loads((self.out / SETTINGS).read_text())
        except (OSError, ValueError):
            before = None
        return before if isinstance(before, dict) else {"settings": "unknown"}


def check_writable(out: Path, option: str = "--out") -> None:
    """Refuse a path that is not, and cannot become, a folder to write in; create nothing.

    Args:
        out: the path.
        option: what messages call it.

    Raises:
        AttnmonError: it is a file, lies below one, or may not be written.

    Source: ours.
    """
    parent = out
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not os.path.isdir(parent):
        raise AttnmonError(f"cannot write to {option} {out}: {parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AttnmonError(f"cannot write to {option} {out}: no permission to write in {parent}")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file under its final name only once it is whole.

    Args:
        path: the final name, in a folder that exists.
        content: text (written as UTF-8) or bytes.

    Raises:
        AttnmonError: it cannot be written; an older file of that name is as it was.

    Source: ours.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except OSError as error:  # a full disk, say
        raise AttnmonError(f"cannot write {path}: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)


def write_table(folder: Path, name: str, records: Sequence[Record]) -> list[Path]:
    """Write a table as CSV, and as Parquet where pyarrow is installed.

    Args:
        folder: where to; it must exist.
        name: of the files, without a suffix.
        records: rows of the same columns.

    Returns:
        The files.

    Raises:
        AttnmonError: a file cannot be written.

    Source: ours.
    """
    paths = [folder / f"{name}.csv"]
    write_atomic(paths[0], to_csv(records))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return paths
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(records)), buffer)
    paths.append(folder / f"{name}.parquet")
    write_atomic(paths[1], buffer.getvalue().to_pybytes())
    return paths


def to_csv(records: Sequence[Record]) -> str:
    """Format records as CSV; floats keep every digit.

    Args:
        records: rows of the same columns.

    Returns:
        The text of the file, its header first.

    Source: ours.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def read_csv(path: Path) -> list[Record]:
    """Read what ``to_csv`` formatted.

    Args:
        path: of the file.

    Returns:
        Records; numbers as numbers, an empty cell as None.

    Raises:
        OSError: the file cannot be read.

    Source: ours.
    """
    with path.open(newline="") as file:
        return [{name: _cell(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def _cell(name: str, text: str) -> Any:
    if name in _TEXT_COLUMNS:
        return text
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    # through JSON, so that tuples compare as the lists they are stored as
    now = json.loads(json.dumps(dict(now)))
    return [
        f"{name}: {_short(before.get(name))} there, {_short(now.get(name))} now"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
