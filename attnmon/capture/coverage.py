"""What was seen, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

MAY_BE_FUSED = (
    "in evaluation mode; torch may then run it inside one fused kernel, which makes no attention call to be seen"
)


@dataclass(frozen=True, slots=True)
class CoverageRecord:
    """One attention module.

    Attributes:
        path: canonical module path.
        kind: "self" or "cross".
        heads: query heads; None until a call was seen.
        status: "captured", "waiting" (no measured step has ended yet) or "skipped".
        reason: why it is skipped; "" otherwise.
        route: how its calls are seen ("sdpa", "eager", ...); "" until one was.
        calls: attention calls measured so far.
        refused: calls that were not measured, by reason.
        backend: what reduced its newest call, "torch" or "triton"; "" until one was.
    """

    path: str
    kind: str
    heads: int | None
    status: str
    reason: str
    route: str
    calls: int
    refused: dict[str, int]
    backend: str = ""


@dataclass(slots=True)
class Site:
    """A place that makes attention calls: one module, under its canonical path."""

    path: str
    kind: str
    expected: bool  # it looks like attention; others appear only once they make a call
    excluded: bool = False
    depth: int = 0  # of its path
    at_once: bool = False  # its calls cannot wait for the end of the forward
    child_left_alone: bool = False  # a module in it is left alone
    left_alone: str = ""  # why it is left alone from now on
    in_evaluation: bool = False  # as it was when a measured step began
    heads_hint: int | None = None  # what the module's attributes say
    heads: int | None = None
    route: str = ""
    calls: int = 0
    seen: int = 0  # calls that wait to be measured, or were
    backend: str = ""
    refused: Counter[str] = field(default_factory=Counter)

    def refuse(self, reason: str) -> bool:
        """Count a call that is not measured; True the first time for this reason."""
        self.refused[reason] += 1
        return self.refused[reason] == 1

    def record(self, measured_steps: int) -> CoverageRecord:
        """The site's state after ``measured_steps`` measured steps."""
        if self.left_alone:
            status, reason = "skipped", self.left_alone
        elif self.calls:
            status, reason = "captured", ""
        elif self.excluded:
            status, reason = "skipped", "excluded by the include and exclude patterns"
        elif self.refused:
            status, reason = "skipped", self.refused.most_common(1)[0][0]
        elif measured_steps and self.in_evaluation:
            status, reason = "skipped", MAY_BE_FUSED
        elif measured_steps:
            status, reason = "skipped", "it made no attention call that attnmon sees"
        else:
            status, reason = "waiting", ""
        return CoverageRecord(
            self.path, self.kind, self.heads, status, reason, self.route, self.calls, dict(self.refused), self.backend
        )


def coverage_table(records: Iterable[CoverageRecord]) -> str:
    """A plain text table, one line per module."""
    rows = [("module", "kind", "heads", "route", "backend", "status")]
    for record in records:
        status = f"{record.status}: {record.reason}" if record.reason else record.status
        heads = "-" if record.heads is None else str(record.heads)
        rows.append((record.path or "(model)", record.kind, heads, record.route or "-", record.backend or "-", status))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]).rstrip()
        for row in rows
    )
