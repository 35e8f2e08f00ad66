"""Which units are missing, and their computation: one forward a chunk and length feeds every experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from attnmon.paper.capture import Head, attention_calls, heads_of
from attnmon.paper.measure import Place, measure_head
from attnmon.paper.model import Subject
from attnmon.paper.options import Options
from attnmon.paper.progress import bar
from attnmon.paper.store import Record, Store
from attnmon.types import AttentionCall


def missing(options: Options, store: Store) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """(chunk, length, experiments that are not stored yet)."""
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
    subject: Subject, options: Options, store: Store, heads: int, *, only: int | None = None, quiet: bool = False
) -> int:
    """Compute and store what is missing.

    Args:
        subject: model and tokens.
        options, store: what, and where to.
        heads: of all attention calls of a forward together, for the progress bar.
        only: this length alone.
        quiet: without a progress bar.

    Returns:
        How many units were computed.
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
                    return measure_head(head, tuple(found), options, Place(length, chunk, seed))

                for records in pool.map(measure, heads_of(number, module, call, options.tokens)):
                    for name, new in records.items():
                        found[name] += new
                    shown.step(step, f"chunk {chunk + 1} of {options.chunks}, L = {length}, {module or 'model'}")

            tokens = subject.tokens[chunk, :length]
            attention_calls(subject.model, tokens, tell, with_hidden=options.tokens == "hidden")
            for name, records in found.items():
                store.save(name, length, chunk, records)
    return count


def _work(length: int, wanted: tuple[str, ...], options: Options) -> float:
    """How long a head takes, in units of nobody's clock: rows times keys, and experiment 3 does most of it."""
    weight = {"critical-n": 3.0 + options.draws, "sensitivity": 3.0, "separability": 1.5, "distance-topn": 2.0}
    return length**2 * sum(weight.get(name, 1.0) for name in wanted) + 1.0


def _seed(*parts: int) -> int:
    """A seed for one head of one unit, whatever else is computed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _pool() -> ThreadPoolExecutor:
    """One head a thread: blocks of rows are too small to be worth sharing among cores."""

    def alone() -> None:
        torch.set_num_threads(1)  # of this thread's own operations
        torch.set_grad_enabled(False)
        torch.set_flush_denormal(True)  # weights that low say nothing here, and cost time

    return ThreadPoolExecutor(torch.get_num_threads(), initializer=alone)
