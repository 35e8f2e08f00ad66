"""The rows that the experiments see are those of the model, and a model that is not causal is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnmon.errors import AttnmonError
from attnmon.paper.capture import attention_calls, check_causal, heads_of
from attnmon.paper.measure import Excerpt, HeadRows
from attnmon.paper.options import PaperOptions
from tests.helpers import slow_but
from tests.models import DECODERS, IDS, build

pytest.importorskip("transformers")

OPTIONS = PaperOptions(text=b"", text_name="text", out=Path("nowhere"), lengths=(16,), top_n=(1, 5))
CAUSAL = [name for name in DECODERS if name not in ("bert", "roberta")]


def captured(model, tokens, kind="value"):
    """Heads of one forward, in order."""
    heads = []

    def take(number, module, call):
        heads.extend(heads_of(number, module, call, kind))

    attention_calls(model, tokens, take, with_hidden=kind == "hidden")
    return heads


@pytest.mark.parametrize(
    ("name", "attention"),
    slow_but(
        [(name, DECODERS[name][5][0]) for name in CAUSAL],
        [(name, attention) for name in CAUSAL for attention in DECODERS[name][5]],
    ),
)
def test_weights_are_those_of_the_model(name, attention):
    model, config, path, head_dim, scale, _ = DECODERS[name]
    with torch.no_grad():
        twin = build(model, config, "eager")(input_ids=IDS[:1], output_attentions=True).attentions
    heads = captured(build(model, config, attention), IDS[0])
    assert [(head.layer, head.head) for head in heads] == [(layer, h) for layer in range(2) for h in range(4)]
    for head in heads:
        rows = HeadRows(head, Excerpt(len(IDS[0]), 0, 0), (), OPTIONS)
        expected = twin[head.layer][0, head.head]
        torch.testing.assert_close(rows.weights, expected, rtol=1e-4, atol=1e-6)
        assert not head.visible.triu(1).any()
        assert head.module == path.format(head.layer)
        factor = head_dim**-0.5 if scale is None else scale(head.layer)
        assert head.tau == pytest.approx(1.0 / (factor * head_dim**0.5))
        if name == "gpt-oss":
            keys = head.logits.masked_fill(~head.visible, -torch.inf).logsumexp(-1)
            of_sink = torch.sigmoid(head.sink - keys)  # the sink has what the keys leave
            torch.testing.assert_close(of_sink, 1.0 - expected.sum(-1), rtol=1e-4, atol=1e-5)
        else:
            assert head.sink is None
        if name in ("mistral", "gemma2", "gpt-oss") and head.layer == 0:
            assert int(rows.count.max()) == 6  # the window
    assert check_causal(build(model, config, attention), IDS[0], name, with_experiments("separability")) == 8


def with_experiments(*names):
    return replace(OPTIONS, experiments=names)


def test_vectors_are_of_unit_length_unless_asked_otherwise():
    model = build(*DECODERS["llama"][:2], "sdpa")
    unit, raw = captured(model, IDS[0]), captured(model, IDS[0], "value_raw")
    hidden = captured(model, IDS[0], "hidden")
    for a, b, c in zip(unit, raw, hidden, strict=True):
        torch.testing.assert_close(torch.linalg.vector_norm(a.tokens, dim=-1), torch.ones(len(IDS[0])))
        torch.testing.assert_close(a.tokens, torch.nn.functional.normalize(b.tokens, dim=-1))
        assert c.tokens.shape == (len(IDS[0]), 32)
    # two heads share a key head and its values
    assert torch.equal(raw[0].tokens, raw[1].tokens)
    assert not torch.equal(raw[1].tokens, raw[2].tokens)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_looks_ahead_is_refused(attention):
    model = build(*DECODERS["bert"][:2], attention)
    with pytest.raises(
        AttnmonError, match=r"bert is no causal model: in encoder\.layer\.0\.attention\.self tokens attend"
    ):
        check_causal(model, IDS[0], "bert", OPTIONS)


def test_learned_sinks_are_refused_where_nothing_is_defined_for_them():
    model = build(*DECODERS["gpt-oss"][:2], "eager")
    with pytest.raises(AttnmonError, match="has learned attention sinks, for which normalizers and sensitivity"):
        check_causal(model, IDS[0], "gpt-oss", OPTIONS)


def test_a_model_without_attention_is_refused():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, input_ids, use_cache):
            return input_ids

    with pytest.raises(AttnmonError, match="found no attention in Plain"):
        attention_calls(Plain(), IDS[0], lambda *_: None)


def test_what_fails_while_measuring_reaches_the_caller():
    model = build(*DECODERS["llama"][:2], "sdpa")

    def fail(number, module, call):
        raise AttnmonError("of ours")

    with pytest.raises(AttnmonError, match="of ours"):
        attention_calls(model, IDS[0], fail)
    assert captured(model, IDS[0])  # and the model is as it was


def test_a_logit_that_is_not_finite_is_refused():
    model = build(*DECODERS["llama"][:2], "sdpa")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(AttnmonError, match=r"model\.layers\.1\.self_attn, head 0: a logit or a vector is not finite"):
        [HeadRows(head, Excerpt(20, 0, 0), (), OPTIONS) for head in captured(model, IDS[0])]
