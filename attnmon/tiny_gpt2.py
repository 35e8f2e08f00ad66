"""One small GPT-2 for whatever trains or times one: the demo, ``attnmon paper`` and the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def tiny_gpt2(
    *,
    layers: int,
    heads: int,
    width: int,
    length: int,
    vocabulary: int = 256,
    attention: str | None = None,
    **more: Any,
) -> GPT2LMHeadModel:
    """Build a GPT-2 with weights drawn from torch's global generator, without dropout and without a cache.

    Args:
        layers: number of blocks.
        heads: number of heads of each block.
        width: of the hidden states, a multiple of ``heads``.
        length: most tokens that the model reads.
        vocabulary: number of tokens; the default is that of bytes.
        attention: transformers' ``attn_implementation``; None leaves the choice to transformers.
        more: further fields of ``GPT2Config``; they win over those set here.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    fields: dict[str, Any] = {
        "vocab_size": vocabulary,
        "n_positions": length,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        # with attention dropout, PyTorch's CPU attention falls back to a slow path
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        # GPT-2's own lie beyond a small vocabulary
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    if attention is not None:
        fields["attn_implementation"] = attention
    return GPT2LMHeadModel(GPT2Config(**{**fields, **more}))
