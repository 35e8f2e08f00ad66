"""How long the paper's five experiments take on a GPT-2 124M-shaped model, beside what the paper reports.

The weights are random (seeded): no time here depends on what a model has learnt, but for rows so sharp that a number
is computed again from difference vectors. Each figure is the wall time of measuring and storing, forwards included,
loading and drawing excluded. The paper's times were taken on a 10-core laptop: another machine, another number of
texts, so a ratio to them is an order of magnitude and no speed-up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from attnmon.paper.capture import check_causal
from attnmon.paper.command import settings_of
from attnmon.paper.model import Subject, prepare
from attnmon.paper.options import LENGTHS, PaperOptions
from attnmon.paper.runner import run_units
from attnmon.paper.store import Store

PAPER_MINUTES = {
    "distance-length": 24.0,
    "distance-topn": 37.0,
    "critical-n": 17 * 60 + 4.0,
    "separability": 7.0,
    "sensitivity": 1.0,
}
"""What the paper reports for its Algorithms 1 to 5, on a 10-core laptop."""


@dataclass(frozen=True)
class Shape:
    """A GPT-2-shaped model."""

    layers: int
    heads: int
    dim: int
    vocab: int


GPT2 = Shape(layers=12, heads=12, dim=768, vocab=50257)
QUICK = Shape(layers=2, heads=4, dim=64, vocab=256)


def build(shape: Shape, lengths: Sequence[int], chunks: int) -> Subject:
    """A model with random weights, and random tokens for it."""
    longest = max(lengths)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=shape.vocab,
                n_positions=max(1024, longest),
                n_embd=shape.dim,
                n_layer=shape.layers,
                n_head=shape.heads,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab, (chunks, longest), generator=generator)
    return Subject(prepare(model, "cpu"), tokens, "GPT-2-shaped, random weights", "random tokens", "seed 0")


def measure(
    subject: Subject, case: str, lengths: Sequence[int], chunks: int, only: Sequence[int] | None = None
) -> dict[str, Any]:
    """Wall seconds of one case, length by length.

    Args:
        subject: the model.
        case: of ``benchmarks.cases.PAPER``.
        lengths: L of the settings.
        chunks: pieces of text.
        only: of the lengths, those to measure now; None for all.
    """
    options = PaperOptions(
        text=b"",
        text_name="random tokens",
        out=Path(),
        experiments=tuple(PAPER_MINUTES) if case == "together" else (case,),
        lengths=tuple(sorted(lengths)),
        top_n=tuple(n for n in (1, 5, 10, 20, 100) if n < max(lengths)),
        chunks=chunks,
    )
    heads = check_causal(subject.model, subject.tokens[0], subject.name, options)
    seconds: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = replace(options, out=Path(folder))
        store = Store(options.out, settings_of(subject, options))
        for length in only or options.lengths:
            begin = time.perf_counter()
            if run_units(subject, options, store, heads, only=length, quiet=True):
                seconds[length] = time.perf_counter() - begin
    complete = set(seconds) == {length for name in options.experiments for length in options.lengths_of(name)}
    complete = complete and options.lengths == LENGTHS
    minutes = PAPER_MINUTES.get(case, sum(PAPER_MINUTES.values()))
    spent = sum(seconds.values())
    return {
        "name": case,
        "lengths": list(seconds),
        "chunks": chunks,
        "heads": heads,
        "seconds_by_length": {str(length): value for length, value in seconds.items()},
        "seconds": spent,
        "complete": complete,
        "paper_seconds": minutes * 60.0,
        "paper_over_ours_on_different_machines": minutes * 60.0 / spent if complete else None,
    }


COLUMNS = ("experiment", "L", "chunks", "here, min", "paper (10-core laptop), min", "paper / here, different machines")


def row(result: dict[str, Any]) -> list[str]:
    """One line a case."""
    ratio = result["paper_over_ours_on_different_machines"]
    return [
        result["name"],
        " ".join(map(str, result["lengths"])),
        str(result["chunks"]),
        f"{result['seconds'] / 60:.2f}",
        f"{result['paper_seconds'] / 60:.0f}",
        "not all lengths measured" if ratio is None else f"{ratio:.3g}",
    ]
