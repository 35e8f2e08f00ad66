"""``attnmon paper`` in order: refuse, load or train, measure what is missing, report."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from attnmon.errors import AttnmonError
from attnmon.paper import small_model
from attnmon.paper.capture import check_causal
from attnmon.paper.model import Subject, check_device, context_length, identity_of, load, vocabulary_size
from attnmon.paper.options import EPSILONS, TEMPERATURES, PaperOptions
from attnmon.paper.progress import bar
from attnmon.paper.report import write_report
from attnmon.paper.runner import run_units
from attnmon.paper.store import Store, check_writable
from attnmon.paper.text import fingerprint, tokenize

MODEL_FOLDER = "model"


def run(options: PaperOptions, *, quiet: bool = False) -> list[Path]:
    """Measure what is not stored yet and write the report.

    Args:
        options: what to measure, and where results go.
        quiet: show no progress bars.

    Returns:
        The files of the report, the page last.

    Raises:
        AttnmonError: the model, the text, the device or the folder cannot be used; nothing but a trained small model
            has been written then.

    Source: paper, experiments 1 to 5.
    """
    check_writable(options.out)
    check_device(options.device)
    subject = _trained(options, quiet) if options.model is None else _loaded(options)
    return measure(subject, options, quiet=quiet)


def measure(subject: Subject, options: PaperOptions, *, quiet: bool = False) -> list[Path]:
    """Measure what is not stored yet on a model that is loaded already, and write the report.

    Args:
        subject: model and tokens.
        options: what to measure, and where results go.
        quiet: show no progress bars.

    Returns:
        The files of the report, the page last.

    Raises:
        AttnmonError: the model or the folder cannot be used.

    Source: paper, experiments 1 to 5.
    """
    heads = check_causal(subject.model, subject.tokens[0], subject.name, options)
    store = Store(options.out, settings_of(subject, options), options.restart)
    run_units(subject, options, store, heads, quiet=quiet)
    return write_report(subject, options, store)


def settings_of(subject: Subject, options: PaperOptions) -> dict[str, Any]:
    """List what every unit of a folder depends on.

    Chunks, experiments and lengths but the longest are no part of it: they may be added later. The longest length is,
    since chunks are that long.

    Args:
        subject: model and tokens.
        options: what to measure.

    Returns:
        Name -> JSON-ready value.

    Source: ours.
    """
    return {
        "attnmon": version("attnmon"),
        "model": f"{subject.name} ({subject.identity})",
        "text": fingerprint(options.text + subject.tokens[0].numpy().tobytes()),
        "longest length": options.longest,
        "top_n": list(options.top_n),
        "length_top_n": options.length_top_n,
        "draws": options.draws,
        "tokens": options.tokens,
        "seed": options.seed,
        "temperatures": list(TEMPERATURES),
        "epsilons": list(EPSILONS),
    }


def _loaded(options: PaperOptions) -> Subject:
    name = str(options.model)
    model, tokenizer = load(name, options.device)
    _check_context(model, options, name)
    tokens = tokenize(options, tokenizer, vocabulary_size(model))
    reading = f"tokenizer of the model ({type(tokenizer).__name__})" if tokenizer is not None else (
        "read as bytes, one token each, since the model has no tokenizer"
    )  # fmt: skip
    return Subject(model, tokens, name, reading, identity_of(model))


def _trained(options: PaperOptions, quiet: bool) -> Subject:
    """Load or train the small model; it is measured on the end of the text and trained on the rest."""
    start = small_model.held_out(options)
    folder = options.out / MODEL_FOLDER
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AttnmonError(f"cannot write to --out {options.out}: {error.strerror}") from error
    title = f"training a small GPT-2 for {options.train_steps} steps"
    with bar(options.train_steps, title, quiet=quiet) as shown:
        model = small_model.small_model(
            options, folder, lambda step, loss: shown.step(1, f"training a small GPT-2, loss {loss:.2f}")
        )
    tokens = tokenize(replace(options, text=options.text[start:]), None, vocabulary_size(model))
    name = f"a small GPT-2 trained on the text for {options.train_steps} steps, seed {options.seed} ({folder})"
    reading = f"read as bytes, one token each; its last {len(options.text) - start:,} bytes, not trained on"
    return Subject(model, tokens, name, reading, identity_of(model))


def _check_context(model: nn.Module, options: PaperOptions, name: str) -> None:
    limit = context_length(model)
    if limit is not None and options.longest > limit:
        raise AttnmonError(f"{name} reads at most {limit} tokens; --lengths asks for {options.longest}")
