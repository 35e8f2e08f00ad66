"""Snapshots and alerts as JSON Lines: append-only, strict, readable while a run goes on and after it was killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from attnmon.errors import AttnmonError, AttnmonWarning
from attnmon.types import Alert, Snapshot
from attnmon.writers.base import Writer

SCHEMA = 1
"""Version of the record layout; it rises when a reader of the old layout would misread a new record."""

DEFAULT_NAME = "attnmon.jsonl"
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json")


class JsonlWriter(Writer):
    """Appends one JSON object per line to a file: ``{"kind": "snapshot" | "alert", "schema": 1, ...fields}``.

    Fields are those of ``Snapshot.to_dict`` and ``Alert.to_dict``; numbers that are not finite are null. Metric
    values carry nine significant digits, which give the float32 back exactly. Every record reaches the operating
    system before the call returns, so a killed process loses no record. A crash of the machine may damage the record
    that was being written. The file is created by the first record.

    Args:
        path_or_dir: a file if it exists as one or ends in .jsonl, .ndjson or .json; otherwise a directory, in which
            the file is ``attnmon.jsonl``. Records are appended to an existing file.

    Attributes:
        path: the file.

    Raises:
        OSError: raised by a write, if the file cannot be written; the next write opens the file again.
    """

    def __init__(self, path_or_dir: str | os.PathLike[str]) -> None:
        self.path = _resolve(path_or_dir)
        self._file: BinaryIO | None = None

    def write_snapshot(self, snapshot: Snapshot) -> None:
        data = snapshot.to_dict()
        data["values"] = {
            metric: {
                path: [None if head is None else float(f"{head:.9g}") for head in heads]
                for path, heads in by_path.items()
            }
            for metric, by_path in data["values"].items()
        }
        data["settings"] = _strict(data["settings"])  # settings may contain objects of any type
        self._append([{"kind": "snapshot", "schema": SCHEMA, **data}])

    def write_alerts(self, alerts: Sequence[Alert]) -> None:
        self._append([{"kind": "alert", "schema": SCHEMA, **_strict(alert.to_dict())} for alert in alerts])

    def flush(self) -> None:
        """Do nothing: every record is flushed when it is written."""

    def close(self) -> None:
        """Release the file. A later write opens it again and appends to it."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records)
        if self._file is None:
            self._file = _open_for_append(self.path)
        try:
            self._file.write(lines.encode("ascii"))
            self._file.flush()
        except BaseException:
            # Part of a line may be in the file (disk full, Ctrl-C); opening the file again repairs the line end.
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            raise


def read_jsonl(path_or_dir: str | os.PathLike[str]) -> Iterator[Snapshot | Alert]:
    """Iterate over the records of a file written by ``JsonlWriter``, in order.

    null becomes NaN, except in the baseline of an alert, where it becomes None. An unfinished last line is skipped,
    because a run may be writing it. Other lines that cannot be read are skipped with one AttnmonWarning that counts
    them. Records of an unknown kind and unknown fields of an alert are ignored.

    Args:
        path_or_dir: the file, or the directory that contains ``attnmon.jsonl``.

    Raises:
        FileNotFoundError: there is no such file; raised at the call.
        AttnmonError: a record was written by a newer version; raised while iterating.
    """
    path = _resolve(path_or_dir)
    path.stat()
    return _records(path)


def _records(path: Path) -> Iterator[Snapshot | Alert]:
    damaged: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = _parse(json.loads(line), f"{path}, line {number}")
            except AttnmonError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                if line.endswith(b"\n"):
                    damaged.append(number)
                continue
            if record is not None:
                yield record
    if damaged:
        warnings.warn(
            f"{path}: {len(damaged)} unreadable line{'s' if len(damaged) > 1 else ''} passed over, the first is line "
            f"{damaged[0]}; a run that was killed while writing leaves such a line",
            AttnmonWarning,
            stacklevel=2,
        )


def _parse(data: Mapping[str, Any], where: str) -> Snapshot | Alert | None:
    schema = int(data["schema"])
    if schema > SCHEMA:
        raise AttnmonError(
            f"{where}: expected a record of schema {SCHEMA} or older, got schema {schema}; "
            "read it with the attnmon version that wrote it, or a newer one"
        )
    if data["kind"] == "snapshot":
        return Snapshot.from_dict(data)
    if data["kind"] == "alert":
        fields = {name: data[name] for name in Alert.__slots__}
        for name in ("value", "threshold"):
            fields[name] = math.nan if fields[name] is None else float(fields[name])
        return Alert(**fields)
    return None


def _resolve(path_or_dir: str | os.PathLike[str]) -> Path:
    path = Path(path_or_dir)
    if path.is_file() or (path.suffix in _FILE_SUFFIXES and not path.is_dir()):
        return path
    return path / DEFAULT_NAME


def _open_for_append(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab+")
    size = file.seek(0, os.SEEK_END)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":  # a run was killed within a line: start a new line for the next record
            file.write(b"\n")
    return file


def _strict(value: Any) -> Any:
    """Convert ``value`` to strict JSON: null for numbers that are not finite, text for types unknown to JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_strict(item) for item in value]
    return str(value)
