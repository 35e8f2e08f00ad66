"""Text models of transformers: every attention module is captured, with the numbers of its own weights."""

from __future__ import annotations

import pytest
import torch

import attnmon
from tests.capture.weights import EVERYTHING, assert_heads, entropy, jacobian, of_rows, randomize, watched
from tests.models import DECODERS, IDS, LEFT, RIGHT, TOKENS, B, L, build

transformers = pytest.importorskip("transformers")

TARGETS = 9


@pytest.mark.parametrize(
    "padding", [None, LEFT, pytest.param(RIGHT, marks=pytest.mark.slow)], ids=["full", "left", "right"]
)
@pytest.mark.parametrize(
    ("name", "attention"), [(name, attention) for name in DECODERS for attention in DECODERS[name][5]]
)
def test_one_attention_a_layer(name, attention, padding):
    model, config, path, head_dim, scale, _ = DECODERS[name]
    twin = build(model, config, "eager")
    inputs = {"input_ids": IDS} if padding is None else {"input_ids": IDS, "attention_mask": padding.long()}
    with torch.no_grad():
        weights = twin(**inputs, output_attentions=True).attentions
    valid = torch.ones(B, L, dtype=torch.bool) if padding is None else padding

    snapshot, coverage = watched(build(model, config, attention), **inputs)
    assert list(coverage) == [path.format(layer) for layer in range(2)]
    for layer, record in enumerate(coverage.values()):
        where = record.path
        assert (record.status, record.kind, record.heads, record.calls) == ("captured", "self", 4, 1)
        assert record.refused == {}
        assert (snapshot.rows[where] == int(valid.sum())).all()
        assert (snapshot.excluded_by_reason["padding"][where] == int((~valid).sum())).all()
        assert_heads(snapshot["entropy"][where], entropy(weights[layer], valid), what="entropy")
        expected = of_rows(weights[layer].double().amax(-1), valid)
        assert_heads(snapshot["max_prob"][where], expected, what="max_prob")
        factor = head_dim**-0.5 if scale is None else scale(layer)
        tau = 1.0 / (factor * head_dim**0.5)
        assert_heads(snapshot["jacobian"][where], jacobian(weights[layer], tau, valid), rtol=3e-4, what="jacobian")
        if name == "gpt-oss":
            missing = 1.0 - weights[layer].double().sum(-1)
            assert float(missing.mean()) > 0.01
            assert_heads(snapshot["sink_mass"][where], of_rows(missing, valid), what="sink_mass")
        else:
            assert where not in snapshot.values.get("sink_mass", {})
        assert where in snapshot["separability"]  # the values were seen
        if name in ("gpt-oss", "gemma2"):  # max_logit is not shifted by what makes a softmax stable
            assert float(snapshot["max_logit"][where].min()) > 0.0
    # far from uniform, or the test would say little
    assert float(snapshot["entropy_norm"][path.format(0)].min()) < 0.97


def bart():
    return transformers.BartConfig(
        vocab_size=90, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
        decoder_start_token_id=1, **TOKENS,
    )  # fmt: skip


def t5():
    return transformers.T5Config(
        vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def whisper():
    return transformers.WhisperConfig(
        vocab_size=90, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=L,
        max_target_positions=32, decoder_start_token_id=1, dropout=0.0, **TOKENS,
    )  # fmt: skip


# configuration, paths (encoder, decoder, cross), heads (encoder, decoder), true tau given (heads -> D)
SEQ2SEQ = {
    "t5": (
        "T5ForConditionalGeneration", t5,
        ("encoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.0.SelfAttention",
         "decoder.block.{}.layer.1.EncDecAttention"), (4, 4), lambda heads: 1 / 8**0.5,
    ),
    "bart": (
        "BartForConditionalGeneration", bart,
        ("model.encoder.layers.{}.self_attn", "model.decoder.layers.{}.self_attn",
         "model.decoder.layers.{}.encoder_attn"), (4, 2), lambda heads: 1.0,
    ),
    "whisper": (
        "WhisperForConditionalGeneration", whisper,
        ("model.encoder.layers.{}.self_attn", "model.decoder.layers.{}.self_attn",
         "model.decoder.layers.{}.encoder_attn"), (4, 2), lambda heads: 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("targets", [TARGETS, L], ids=["short", "as_long_as_the_source"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder_and_cross(name, attention, targets):
    cls, config, paths, heads, true_tau = SEQ2SEQ[name]

    def make(implementation):
        torch.manual_seed(1)
        made = config()
        made._attn_implementation = implementation
        return randomize(getattr(transformers, cls)(made))

    inputs = {"decoder_input_ids": IDS[:, :targets]}
    source = torch.ones(B, L, dtype=torch.bool)
    if name == "whisper":
        inputs["input_features"] = torch.randn(B, 8, 2 * L, generator=torch.Generator().manual_seed(4))
    else:
        inputs |= {"input_ids": IDS, "attention_mask": RIGHT.long()}
        source = RIGHT
    with torch.no_grad():
        outputs = make("eager")(**inputs, output_attentions=True)
    kinds = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)

    snapshot, coverage = watched(make(attention), **inputs)
    assert set(coverage) == {path.format(layer) for path in paths for layer in range(2)}
    for kind, (path, weights) in enumerate(zip(paths, kinds, strict=True)):
        count = heads[0] if kind == 0 else heads[1]
        valid = source if kind == 0 else None  # a query of the decoder is no padding because the source is
        for layer in range(2):
            where = path.format(layer)
            record = coverage[where]
            assert (record.status, record.heads, record.refused) == ("captured", count, {})
            assert record.kind == ("cross" if kind == 2 else "self")
            rows = int(source.sum()) if kind == 0 else B * targets
            assert (snapshot.rows[where] == rows).all()
            assert_heads(snapshot["entropy"][where], entropy(weights[layer], valid), what=where)
            expected = jacobian(weights[layer], true_tau(count), valid)
            assert_heads(snapshot["jacobian"][where], expected, rtol=3e-4, what=f"jacobian {where}")
            assert where in snapshot["distance"]


def test_a_cache_does_not_make_self_attention_cross():
    model = build(*DECODERS["llama"][:2], "sdpa")

    monitor = attnmon.watch(model, **EVERYTHING)
    with torch.no_grad():
        past = model(input_ids=IDS[:, :12], use_cache=True).past_key_values
        with monitor.step():
            model(input_ids=IDS[:, 12:], cache=past)
        twin = build(*DECODERS["llama"][:2], "eager")
        weights = twin(input_ids=IDS, output_attentions=True).attentions
    snapshot = monitor.flush()
    for layer, record in enumerate(monitor.coverage()):
        assert (record.kind, record.status) == ("self", "captured")
        assert_heads(snapshot["entropy"][record.path], entropy(weights[layer][:, :, 12:]))
    monitor.close()
