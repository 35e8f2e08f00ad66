"""Models that several test files watch: small attention modules in plain torch, and small models of transformers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.capture.weights import randomize

# -- one module for each way of calling attention, and a model of them ----------------------------------------------

WIDTH, HEADS = 16, 2


class SdpaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class EagerAttention(SdpaAttention):
    def attend(self, q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class EinsumAttention(SdpaAttention):
    def attend(self, q, k, v):
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5, -1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)


class MhaAttention(nn.Module):
    def __init__(self, dropout=0.0, need_weights=True):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


KINDS = {"sdpa": SdpaAttention, "eager": EagerAttention, "einsum": EinsumAttention, "mha": MhaAttention}


class Model(nn.Module):
    def __init__(self, kind, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def inputs(batch=2, length=6, seed=1):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


# -- masks and checkpoints ------------------------------------------------------------------------------------------

SMALL_HEADS, SMALL_LENGTH, SMALL_WIDTH = 2, 18, 8


class SmallAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(SMALL_WIDTH, 3 * SMALL_WIDTH)
        self.gain = 1.0

    def forward(self, hidden, mask=None):
        batch, length, _ = hidden.shape
        q, k, v = self.qkv(hidden).view(batch, length, 3, SMALL_HEADS, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.gain * q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(2)


class SmallModel(nn.Module):
    """Two layers, no dropout."""

    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(SmallAttention() for _ in range(layers))
        self.checkpointing = None

    def forward(self, hidden, mask=None):
        for layer in self.layers:
            if self.checkpointing is None:
                hidden = hidden + layer(hidden, mask)
            else:
                hidden = hidden + checkpoint(layer, hidden, mask, use_reentrant=self.checkpointing)
        return hidden


def small_inputs(batch=4, seed=1, scale=1.0):
    return scale * torch.randn(batch, SMALL_LENGTH, SMALL_WIDTH, generator=torch.Generator().manual_seed(seed))


# -- text models of transformers, imported when one is built --------------------------------------------------------

B, L = 3, 20
IDS = torch.randint(2, 88, (B, L), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(L)[None] < torch.tensor([[L], [13], [7]])
LEFT = RIGHT.flip(1)
SHARED = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {**SHARED, **TOKENS, "num_key_value_heads": 2, "intermediate_size": 48}
LATENT = {
    **SHARED, **TOKENS, "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip

# name: model, configuration, path of a layer's attention, D, scale (None: 1 / sqrt(D)), implementations
DECODERS = {
    "gpt2": (
        "GPT2LMHeadModel",
        lambda t: t.GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS),
        "transformer.h.{}.attn", 8, None, ("sdpa", "eager"),
    ),
    "gpt2-by-layer": (
        "GPT2LMHeadModel",
        lambda t: t.GPT2Config(
            vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True,
            reorder_and_upcast_attn=True, **TOKENS,
        ),
        "transformer.h.{}.attn", 8, lambda layer: 8**-0.5 / (layer + 1), ("eager",),
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM", lambda t: t.GPTNeoXConfig(**SHARED, **TOKENS, intermediate_size=48),
        "gpt_neox.layers.{}.attention", 8, None, ("sdpa", "eager"),
    ),
    "llama": (
        "LlamaForCausalLM", lambda t: t.LlamaConfig(**GROUPED), "model.layers.{}.self_attn", 8, None,
        ("sdpa", "eager"),
    ),
    "mistral": (
        "MistralForCausalLM", lambda t: t.MistralConfig(**GROUPED, sliding_window=6), "model.layers.{}.self_attn", 8,
        None, ("sdpa", "eager"),
    ),
    "qwen2": (
        "Qwen2ForCausalLM", lambda t: t.Qwen2Config(**GROUPED), "model.layers.{}.self_attn", 8, None,
        ("sdpa", "eager"),
    ),
    "qwen3": (
        "Qwen3ForCausalLM", lambda t: t.Qwen3Config(**GROUPED, head_dim=16), "model.layers.{}.self_attn", 16, None,
        ("sdpa", "eager"),
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        lambda t: t.Gemma2Config(
            **GROUPED, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=24
        ),
        "model.layers.{}.self_attn", 16, lambda layer: 24**-0.5, ("eager",),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda t: t.GptOssConfig(
            **GROUPED, head_dim=16, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
        ),
        "model.layers.{}.self_attn", 16, None, ("eager",),
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM", lambda t: t.DeepseekV2Config(**LATENT, q_lora_rank=None),
        "model.layers.{}.self_attn", 16, None, ("sdpa", "eager"),
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM", lambda t: t.DeepseekV3Config(**LATENT, q_lora_rank=16, n_shared_experts=1),
        "model.layers.{}.self_attn", 16, None, ("sdpa", "eager"),
    ),
    "bert": (
        "BertModel", lambda t: t.BertConfig(**SHARED, **NO_DROPOUT, intermediate_size=48),
        "encoder.layer.{}.attention.self", 8, None, ("sdpa", "eager"),
    ),
    "roberta": (
        "RobertaModel", lambda t: t.RobertaConfig(**SHARED, **NO_DROPOUT, **TOKENS, intermediate_size=48),
        "encoder.layer.{}.attention.self", 8, None, ("sdpa", "eager"),
    ),
}  # fmt: skip


def build(model, config, attention):
    import transformers

    torch.manual_seed(1)
    config = config(transformers)
    config._attn_implementation = attention
    return randomize(getattr(transformers, model)(config))


def gpt2_config(attention, **options):
    """Always of one size; without dropout unless it is asked for."""
    import transformers

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2Config(
        vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation=attention, **{**dropout, **options},
    )  # fmt: skip
