"""Flash attention written out: what the package's kernels compute, densely; keeps the weights of every call."""

from itertools import pairwise

import torch
import torch.nn.functional as F


class Kernel:
    """Functions with the package's signatures. ``weights``: of every call [B, H, Lq, Lk] (packed: B = 1)."""

    def __init__(self):
        self.weights = []

    def dense(self, q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks):
        """One sequence, [L, H, D]; weights [H, Lq, Lk] and output [Lq, H, Dv]."""
        group = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        i = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        j = torch.arange(k.shape[0])[None]
        if alibi_slopes is not None:
            logits = logits - alibi_slopes[:, None, None] * (i - j).abs()
        left, right = (-1 if side is None else side for side in window_size)
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
        if causal:
            visible &= j <= i
        if left >= 0:
            visible &= j >= i - left
        if right >= 0:
            visible &= j <= i + right
        logits = logits.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.view(-1, 1, 1).expand(-1, q.shape[0], 1)], -1)
        weights = logits.softmax(-1).nan_to_num(0.0)[..., : k.shape[0]]
        return weights, torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1))

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False, s_aux=None,
    ):  # fmt: skip
        slopes = [None] * len(q) if alibi_slopes is None else alibi_slopes.expand(len(q), -1)
        done = [
            self.dense(q[b], k[b], v[b], softmax_scale, causal, window_size, softcap, slopes[b], s_aux)
            for b in range(len(q))
        ]
        self.weights.append(torch.stack([weights for weights, _ in done]).detach())
        return torch.stack([output for _, output in done])

    def flash_attn_qkvpacked_func(self, qkv, *args, **kwargs):
        return self.flash_attn_func(*qkv.unbind(2), *args, **kwargs)

    def flash_attn_kvpacked_func(self, q, kv, *args, **kwargs):
        return self.flash_attn_func(q, *kv.unbind(2), *args, **kwargs)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None, s_aux=None,
    ):  # fmt: skip
        weights = torch.zeros(1, q.shape[1], q.shape[0], k.shape[0])
        outputs = []
        bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        for (q0, q1), (k0, k1) in bounds:
            options = (softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
            part, output = self.dense(q[q0:q1], k[k0:k1], v[k0:k1], *options)
            weights[0, :, q0:q1, k0:k1] = part.detach()
            outputs.append(output)
        self.weights.append(weights)
        outputs.append(q.new_zeros(q.shape[0] - sum(map(len, outputs)), *outputs[0].shape[1:]))
        return torch.cat(outputs)

    def flash_attn_varlen_qkvpacked_func(self, qkv, cu_seqlens, max_seqlen, *args, **kwargs):
        bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        return self.flash_attn_varlen_func(*qkv.unbind(1), *bounds, *args, **kwargs)

    def flash_attn_varlen_kvpacked_func(self, q, kv, *args, **kwargs):
        return self.flash_attn_varlen_func(q, *kv.unbind(1), *args, **kwargs)

    # -- under the interface of transformers, [B, H, L, D] ---------------------------------------------------

    def registered(
        self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
        is_causal=None, s_aux=None, cu_seq_lens_q=None, cu_seq_lens_k=None, position_ids=None, **kwargs,
    ):  # fmt: skip
        """A stand-in for a registered implementation, its padding worked out apart from transformers."""
        is_causal = module.is_causal if is_causal is None else is_causal
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = (-1, -1)
        if sliding_window is not None and key.shape[2] > sliding_window:
            window = (sliding_window - 1, sliding_window - 1)
        options = (scaling, is_causal, window, softcap, None, s_aux)
        if cu_seq_lens_q is not None:
            flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
            output = self.flash_attn_varlen_func(
                *flat, cu_seq_lens_q, cu_seq_lens_k, None, None, 0.0, scaling, is_causal, window, softcap, s_aux=s_aux
            )
            return output.view(*q.shape[:3], -1), None
        batch, heads, q_len, k_len = *query.shape[:3], key.shape[2]
        weights, outputs = query.new_zeros(batch, heads, q_len, k_len), []
        for b in range(batch):
            keys = torch.arange(k_len) if attention_mask is None else attention_mask[b].nonzero().view(-1)
            queries = torch.arange(q_len)
            if attention_mask is not None:
                queries = keys[keys >= k_len - q_len] - (k_len - q_len)
            part, output = self.dense(q[b, queries], k[b, keys], v[b, keys], *options)
            weights[b, :, queries[:, None], keys] = part.detach()
            outputs.append(q.new_zeros(q_len, heads, v.shape[-1]).index_copy(0, queries, output))
        self.weights.append(weights)
        return torch.stack(outputs), None


def over_sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """A registered implementation that makes a torch call of its own."""
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None
