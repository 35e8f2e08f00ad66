"""A small GPT-2-shaped model for those who name none: trained on the text's bytes, seeded, kept in a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2LMHeadModel

from attnmon.errors import AttnmonError
from attnmon.paper.model import prepare, quiet_transformers
from attnmon.paper.options import PaperOptions
from attnmon.paper.text import fingerprint
from attnmon.tiny_gpt2 import tiny_gpt2

LAYERS, HEADS, DIM, BATCH = 4, 4, 128, 4
_RECIPE = "attnmon.json"  # in the model's folder: what it was made of


def held_out(options: PaperOptions) -> int:
    """Find where the bytes begin that the small model is measured on and not trained on.

    Args:
        options: text, chunks and lengths.

    Returns:
        A position in the text.

    Raises:
        AttnmonError: the text is too short to be split.

    Source: ours.
    """
    # a tenth where that is enough, so that chunks can be added later without moving those that are there
    start = min(len(options.text) * 9 // 10, len(options.text) - options.tokens_needed)
    if start < options.longest * BATCH:
        raise AttnmonError(
            f"{options.text_name} is too short: it has {len(options.text):,} bytes; {options.chunks} chunks of "
            f"{options.longest} and as many to train a small model on take "
            f"{options.tokens_needed + options.longest * BATCH:,}. "
            "Give a longer --text, fewer --chunks, shorter --lengths or a --model"
        )
    return start


def recipe(options: PaperOptions) -> dict[str, Any]:
    """List everything that the trained weights follow from.

    Args:
        options: text, longest length, steps and seed.

    Returns:
        Name -> JSON-ready value.

    Raises:
        AttnmonError: the text is too short to be split.

    Source: ours.
    """
    return {
        "layers": LAYERS,
        "heads": HEADS,
        "dim": DIM,
        "context": options.longest,
        "batch": BATCH,
        "steps": options.train_steps,
        "seed": options.seed,
        "text": fingerprint(options.text[: held_out(options)]),
    }


def small_model(options: PaperOptions, folder: Path, step_done: Callable[[int, float], None]) -> nn.Module:
    """Load the trained model from ``folder``, or train it now and save it there.

    Args:
        options: text, longest length (the model's context), seed, steps, device.
        folder: a folder of transformers' format; replaced if it holds a model of another recipe.
        step_done: told of each step and its loss.

    Returns:
        The model in float32 and evaluation mode, on the device of the options.

    Raises:
        AttnmonError: the text is too short to be split, or the device cannot be used.

    Source: ours; the paper measures GPT-2 124M.
    """
    wanted = recipe(options)
    if _holds(folder, wanted):
        with quiet_transformers():
            return prepare(GPT2LMHeadModel.from_pretrained(folder, local_files_only=True), options.device)
    model = prepare(_train(options, step_done), options.device)
    aside = folder.with_name(folder.name + ".part")
    for old in (aside, folder):
        shutil.rmtree(old, ignore_errors=True)
    with quiet_transformers():
        model.save_pretrained(aside)  # type: ignore[operator]
    (aside / _RECIPE).write_text(json.dumps(wanted, indent=1) + "\n")
    aside.rename(folder)
    return model


def _holds(folder: Path, wanted: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((folder / _RECIPE).read_text()) == wanted)
    except (OSError, ValueError):
        return False


def _train(options: PaperOptions, step_done: Callable[[int, float], None]) -> nn.Module:
    length = options.longest
    text = torch.frombuffer(bytearray(options.text[: held_out(options)]), dtype=torch.uint8).long()
    with torch.random.fork_rng(devices=[]):  # weights are drawn from the global generator
        torch.manual_seed(options.seed)
        # with a cache: whoever loads the folder may generate text
        model: Any = tiny_gpt2(layers=LAYERS, heads=HEADS, width=DIM, length=length, use_cache=True)
    model = model.to(options.device)
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    model.train()
    for step in range(options.train_steps):
        starts = torch.randint(len(text) - length + 1, (BATCH,), generator=generator)
        batch = torch.stack([text[start : start + length] for start in starts.tolist()]).to(options.device)
        logits = model(batch, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        step_done(step + 1, float(loss.detach()))
    trained: nn.Module = model
    return trained
