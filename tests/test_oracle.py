"""Independent of our own formulas: entropies of the weights that transformers' models return themselves."""

from __future__ import annotations

import pytest
import torch

import attnmon

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 90, (3, 24), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(24)[None] < torch.tensor([[24], [17], [9]])
LEFT = RIGHT.flip(1)


def _config(kind):
    shared = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        ),
        "llama": lambda: transformers.LlamaConfig(**shared, num_key_value_heads=2, intermediate_size=48),
        "bert": lambda: transformers.BertConfig(**shared, **dropout, intermediate_size=48),
    }[kind]()


MODELS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertModel"}


def _model(kind, attention, state=None):
    torch.manual_seed(1)
    config = _config(kind)
    config._attn_implementation = attention
    model = getattr(transformers, MODELS[kind])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # so large that attention is far from uniform
                parameter.normal_(std=0.3 if "embed" in name or "wte" in name else 0.25)
    if state is not None:
        model.load_state_dict(state)
    return model.eval()


def _entropies(weights, valid):
    """[layers, H]: mean over valid queries of each layer's weights [B, H, L, L]."""
    means = []
    for layer in weights:
        rows = torch.special.entr(layer.detach().double()).sum(-1)  # [B, H, L]
        means.append((rows * valid[:, None]).sum((0, 2)) / valid.sum())
    return torch.stack(means)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("gpt2", None),
        ("gpt2", RIGHT),
        ("llama", None),
        ("llama", LEFT),
        ("bert", None),
        ("bert", RIGHT),
        ("bert", LEFT),
    ],
    ids=["gpt2", "gpt2-right", "llama", "llama-left", "bert", "bert-right", "bert-left"],
)
def test_entropies_are_those_of_the_models_own_weights(kind, mask, attention):
    eager = _model(kind, "eager")
    inputs = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask.long()}
    with torch.no_grad():
        weights = eager(**inputs, output_attentions=True).attentions
    valid = torch.ones(3, 24, dtype=torch.bool) if mask is None else mask
    expected = _entropies(weights, valid)

    model = _model(kind, attention, eager.state_dict())
    monitor = attnmon.watch(model, rows=None, sequences=None, metrics=["entropy", "max_prob"], rules=())
    with monitor.step():
        model(**inputs)
    snapshot = monitor.flush()
    assert len(snapshot.modules) == 2
    measured = torch.stack([torch.from_numpy(snapshot["entropy"][path]) for path in snapshot.modules])
    torch.testing.assert_close(measured.double(), expected, rtol=2e-5, atol=0.0)
    assert all((snapshot.rows[path] == int(valid.sum())).all() for path in snapshot.modules)
    assert all((snapshot.excluded[path] == int((~valid).sum())).all() for path in snapshot.modules)
    largest = torch.stack([(w.amax(-1) * valid[:, None]).sum((0, 2)) / valid.sum() for w in weights])
    measured = torch.stack([torch.from_numpy(snapshot["max_prob"][path]) for path in snapshot.modules])
    torch.testing.assert_close(measured, largest, rtol=2e-5, atol=0.0)
    # far from uniform, or the test would say little
    assert float(expected.min()) < 0.8 * float(torch.tensor(24.0).log())
    monitor.close()
