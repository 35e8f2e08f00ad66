"""Progress bars of a run that takes minutes; plain lines where nobody watches a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bar:
    """One bar, which ``step`` moves on.

    Args:
        progress: where the bar is shown; None shows nothing.
        total: of all steps together.
        title: beside the bar.

    Source: ours.
    """

    def __init__(self, progress: Progress | None, total: float, title: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(title, total=total)

    def step(self, amount: float = 1.0, title: str | None = None) -> None:
        """Move on by ``amount``; a ``title`` says what is being done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=amount, description=title)


@contextmanager
def bar(total: float, title: str, *, quiet: bool = False) -> Iterator[Bar]:
    """Show a bar on stderr for a while, so that stdout holds results alone.

    Args:
        total: of all steps together.
        title: beside the bar; alone on a line where stderr is no terminal.
        quiet: show nothing.

    Returns:
        A context manager that gives the bar.

    Source: ours.
    """
    if quiet:
        yield Bar(None, total, title)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(title, highlight=False)
        yield Bar(None, total, title)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, total, title)
