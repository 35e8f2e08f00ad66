"""Which units are missing, and their computation: one forward a chunk and length feeds every experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from attnmon.paper.capture import Head, attention_calls, heads_of
from attnmon.paper.measure import Excerpt, measure_head
from attnmon.paper.model import Subject
from attnmon.paper.options import PaperOptions
from attnmon.paper.progress import bar
from attnmon.paper.store import Record, Store
from attnmon.types import AttentionCall


def missing(options: PaperOptions, store: Store) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """List the forwards that are still needed.

    Args:
        options: chunks, lengths and experiments.
        store: finished units.

    Returns:
        An iterator over (chunk, length, experiments that are not stored yet).

    Source: ours.
    """
    for chunk in range(options.chunks):
        for length in options.lengths:
            wanted = tuple(
                name
                for name in options.experiments
                if length in options.lengths_of(name) and not store.has(name, length, chunk)
            )
            if wanted:
                yield chunk, length, wanted


def run_units(
    subject: Subject, options: PaperOptions, store: Store, heads: int, *, only: int | None = None, quiet: bool = False
) -> int:
    """Compute and store what is missing.

    Args:
        subject: model and tokens.
        options: what to measure.
        store: where finished units go.
        heads: of all attention calls of a forward together, for the progress bar.
        only: the one length to compute; None: all lengths.
        quiet: show no progress bar.

    Returns:
        The number of units that were computed.

    Raises:
        AttnmonError: a call cannot be measured, or a file cannot be written; finished units stay.

    Source: paper, Algorithms 1 to 5; that one forward feeds them all is ours.
    """
    todo = [unit for unit in missing(options, store) if only in (None, unit[1])]
    work = sum(_work(length, wanted, options) for _, length, wanted in todo) * heads
    count = sum(len(wanted) for *_, wanted in todo)
    if not todo:
        return 0
    title = f"{count} unit{'s' if count > 1 else ''} to measure: {heads} heads, {len(todo)} forwards"
    with bar(work, title, quiet=quiet) as shown, _pool() as pool:
        for chunk, length, wanted in todo:
            found: dict[str, list[Record]] = {name: [] for name in wanted}
            step = _work(length, wanted, options)

            def tell(
                number: int,
                module: str,
                call: AttentionCall,
                chunk: int = chunk,
                length: int = length,
                found: dict[str, list[Record]] = found,
                step: float = step,
            ) -> None:
                def measure(head: Head) -> dict[str, list[Record]]:
                    seed = _seed(options.seed, chunk, length, head.layer, head.head)
                    return measure_head(head, tuple(found), options, Excerpt(length, chunk, seed))

                for records in pool.map(measure, heads_of(number, module, call, options.tokens)):
                    for name, new in records.items():
                        found[name] += new
                    shown.step(step, f"chunk {chunk + 1} of {options.chunks}, L = {length}, {module or 'model'}")

            tokens = subject.tokens[chunk, :length]
            attention_calls(subject.model, tokens, tell, with_hidden=options.tokens == "hidden")
            for name, records in found.items():
                store.save(name, length, chunk, records)
    return count


def _work(length: int, wanted: tuple[str, ...], options: PaperOptions) -> float:
    """Estimate how long a head takes, in arbitrary units: rows times keys, most of it for experiment 3."""
    weight = {"critical-n": 3.0 + options.draws, "sensitivity": 3.0, "separability": 1.5, "distance-topn": 2.0}
    return length**2 * sum(weight.get(name, 1.0) for name in wanted) + 1.0


def _seed(*parts: int) -> int:
    """Derive a seed for one head of one unit that does not depend on what else is computed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _pool() -> ThreadPoolExecutor:
    """Start threads that take one head each: blocks of rows are too small to be worth sharing among cores."""

    def alone() -> None:
        torch.set_num_threads(1)  # of this thread's own operations
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)  # weights that low say nothing here, and cost time

    return ThreadPoolExecutor(torch.get_num_threads(), initializer=alone)
