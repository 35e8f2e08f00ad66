"""From a text to the tokens that the model reads."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from attnmon.errors import AttnmonError
from attnmon.paper.options import PaperOptions

_BYTES_A_TOKEN = 16  # more than any tokenizer makes of one token on average; if not, the whole text is read


def tokenize(options: PaperOptions, tokenizer: Any, vocabulary: int) -> Tensor:
    """Turn the text into its first ``options.tokens_needed`` tokens.

    Args:
        options: text and how much of it is needed.
        tokenizer: a tokenizer of transformers, or None for bytes.
        vocabulary: the model's number of tokens.

    Returns:
        int64 [chunks, longest length]: consecutive pieces.

    Raises:
        AttnmonError: the text is too short, or has tokens that the model does not know.

    Source: paper, experiments 1 to 5, which read consecutive pieces of one text.
    """
    needed = options.tokens_needed
    if tokenizer is None:
        unit, tokens = "bytes", list(options.text[:needed])
    else:
        unit, tokens = "tokens", _encode(tokenizer, options.text[: needed * _BYTES_A_TOKEN])
        if len(tokens) < needed:
            tokens = _encode(tokenizer, options.text)
    if len(tokens) < needed:
        raise AttnmonError(
            f"{options.text_name} is too short: it has {len(tokens):,} {unit}; {options.chunks} chunks of "
            f"{options.longest} take {needed:,}. Give a longer --text, fewer --chunks or shorter --lengths"
        )
    made = torch.tensor(tokens[:needed], dtype=torch.long)
    if int(made.max()) >= vocabulary:
        raise AttnmonError(
            f"{options.text_name} has token {int(made.max())}, but the model knows {vocabulary}: "
            "the tokenizer in the model's folder is not the model's own, or there is none and bytes do not fit"
        )
    return made.view(options.chunks, options.longest)


def fingerprint(data: bytes) -> str:
    """Hash some bytes to a short name.

    Args:
        data: any bytes.

    Returns:
        16 hexadecimal digits.

    Source: ours.
    """
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _encode(tokenizer: Any, text: bytes) -> list[int]:
    # the model's own maximum length does not matter here: the text is cut into chunks
    found: list[int] = tokenizer(text.decode("utf-8", errors="ignore"), add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    return found
