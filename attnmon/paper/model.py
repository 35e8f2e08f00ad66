"""The model that is measured: a folder or a name of transformers, read from this machine alone."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from attnmon.errors import AttnmonError


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and what it reads.

    Attributes:
        model: in evaluation mode, float32.
        tokens: int64 [chunks, longest length].
        name: how the model is called on the page.
        reading: how the text became tokens, for the page.
        identity: hash of the weights; equal weights have equal hashes.

    Source: ours.
    """

    model: nn.Module
    tokens: Tensor
    name: str
    reading: str
    identity: str


def load(name: str, device: str) -> tuple[nn.Module, Any]:
    """Load a causal model and its tokenizer.

    Args:
        name: a folder, or a model's name whose files are in transformers' cache. Nothing is downloaded.
        device: where the model goes.

    Returns:
        The model in float32 and evaluation mode, and its tokenizer (None where it has none).

    Raises:
        AttnmonError: there is no such model on this machine, it is not a causal language model, or the device cannot
            be used.

    Source: ours.
    """
    is_folder = Path(name).is_dir()
    with quiet_transformers():
        try:
            AutoConfig.from_pretrained(name, local_files_only=True)
        except Exception as error:
            raise AttnmonError(_no_model(name, is_folder, error)) from error
        try:
            model = AutoModelForCausalLM.from_pretrained(name, local_files_only=True)
        except Exception as error:
            said = _first_line(error)
            if "AutoModelForCausalLM" in said:
                said = "its architecture is no causal language model"
            raise AttnmonError(f"cannot load --model {name}: {said}") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception:  # whatever is wrong with it, bytes can be read, and the page says so
            tokenizer = None
        if tokenizer is not None and not _reads(tokenizer):
            tokenizer = None
    return prepare(model, device), tokenizer


def check_device(device: str) -> torch.device:
    """Look up a device by name.

    Args:
        device: a name as torch has them, like "cpu" or "cuda:1".

    Returns:
        The device, with its index where it has one.

    Raises:
        AttnmonError: there is no such device, or it has no float64.

    Source: ours.
    """
    if device.startswith("mps"):
        raise AttnmonError("--device mps cannot be used: it has no float64, which the geometry is computed in")
    try:
        return torch.zeros(1, device=torch.device(device)).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without CUDA asserts
        raise AttnmonError(f"--device {device} cannot be used: {_first_line(error)}") from error


def prepare(model: nn.Module, device: str) -> nn.Module:
    """Convert a model, in place, to what is measured: float32, evaluation mode, on a device.

    Args:
        model: any model.
        device: a name as torch has them.

    Returns:
        The same model.

    Raises:
        AttnmonError: there is no such device, it has no float64, or it has no room for the model.

    Source: ours.
    """
    try:
        return model.float().to(check_device(device)).eval()
    except RuntimeError as error:
        raise AttnmonError(f"--device {device} cannot be used: {_first_line(error)}") from error


def context_length(model: nn.Module) -> int | None:
    """Read the number of positions that a model has.

    Args:
        model: a model of transformers, or any other.

    Returns:
        The number, or None if the model's configuration sets no limit.

    Source: ours.
    """
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def vocabulary_size(model: nn.Module) -> int:
    """Read the number of tokens that a model's input embedding knows.

    Args:
        model: a model of transformers.

    Returns:
        The number of rows of the embedding.

    Source: ours.
    """
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def identity_of(model: nn.Module) -> str:
    """Hash all weights and buffers of a model.

    Args:
        model: any model.

    Returns:
        16 hexadecimal digits.

    Source: ours.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _reads(tokenizer: Any) -> bool:
    """Tell whether a tokenizer makes tokens of a text; without files, transformers builds one that knows no words."""
    try:
        return len(tokenizer("a word", add_special_tokens=False)["input_ids"]) > 0
    except Exception:
        return False


def _no_model(name: str, is_folder: bool, error: Exception) -> str:
    if is_folder:
        return f"cannot load --model {name}: the folder holds no transformers model ({_first_line(error)})"
    return (
        f"cannot load --model {name}: there is no folder of that name, and no model of that name in the cache of this "
        "machine; attnmon downloads nothing, so fetch the model first and give its folder"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and hints for a while; what matters becomes one line of attnmon's.

    Source: ours.
    """
    from transformers.utils import logging as hints

    transformers_logging: Any = hints
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
