"""nn.MultiheadAttention, nn.Transformer and F.multi_head_attention_forward against the weights they return."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attnmon
from tests.capture.weights import EVERYTHING, assert_heads, entropy, jacobian, of_rows, randomize, watched
from tests.helpers import slow_but

B, H, L, S, E = 3, 4, 9, 11, 24


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padding(keys, kind):
    """Which keys are padding, as the model is told and as bool."""
    mask = torch.arange(keys)[None] >= torch.tensor([[keys], [keys - 3], [2]])
    if kind is None:
        return None, torch.zeros(B, keys, dtype=torch.bool)
    return mask if kind == "bool" else torch.zeros(B, keys).masked_fill(mask, -math.inf), mask


def attn_mask(kind, queries, keys):
    causal = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return {
        None: None,
        "2-D bool": causal,
        "2-D float": torch.zeros(queries, keys).masked_fill(causal, -math.inf) + draw(queries, keys, seed=5),
        "3-D bool": draw(B * H, queries, keys, seed=6).lt(-0.5).logical_and(torch.arange(keys) > 0),
        "3-D float": draw(B * H, queries, keys, seed=7),
    }[kind]


class Holder(nn.Module):
    """Gives a MultiheadAttention fixed arguments."""

    def __init__(self, mha, **arguments):
        super().__init__()
        self.mha, self.arguments = mha, arguments

    def forward(self, query, key, value):
        self.output = self.mha(query, key, value, **self.arguments)
        return self.output[0]


def check(mha, query, key, value, valid=None, heads=H, options=None, **arguments):
    """Runs with and without weights asked for; valid [B, Lq]: the queries that are not padding."""
    model = randomize(Holder(mha), std=0.4)
    for name in ("in_proj_bias", "bias_k", "bias_v"):
        parameter = getattr(mha, name)
        if parameter is not None:
            nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        output, weights = mha(query, key, value, need_weights=True, average_attn_weights=False, **arguments)
    if weights.dim() == 3:
        weights = weights[None]
    apart = {"need_weights": True, "average_attn_weights": False}
    for asked in ({"need_weights": True}, apart, {"need_weights": False}):
        model.arguments = {**arguments, **asked}
        snapshot, coverage = watched(model, query, key, value, options=options)
        record = coverage["mha"]
        assert (record.status, record.heads, record.refused, record.calls) == ("captured", heads, {}, 1)
        assert record.kind == ("self" if query is key else "cross")
        assert (model.output[1] is None) == (not asked["need_weights"])  # as the model asked
        torch.testing.assert_close(model.output[0], output)
        assert_heads(snapshot["entropy"]["mha"], entropy(weights, valid), what="entropy")
        assert_heads(snapshot["jacobian"]["mha"], jacobian(weights, 1.0, valid), 5e-4, "jacobian")
        assert_heads(snapshot["max_prob"]["mha"], of_rows(weights.double().amax(-1), valid), what="max_prob")
        count = weights.shape[0] * weights.shape[2] if valid is None else int(valid.sum())
        assert (snapshot.rows["mha"] == count).all()
        assert "mha" in snapshot["distance"]
    return snapshot


MASKED = itertools.product(
    (None, "bool", "float"), (None, "2-D bool", "2-D float", "3-D bool", "3-D float"), (False, True)
)
QUICK = ((None, None, False), (None, "3-D bool", True), ("bool", "2-D bool", False), ("float", "2-D float", True))


@pytest.mark.parametrize(
    ("padded", "masks", "batch_first"),
    slow_but(QUICK, MASKED),
)
def test_self_attention(padded, masks, batch_first):
    mha = nn.MultiheadAttention(E, H, batch_first=batch_first)
    x = draw(B, L, E) if batch_first else draw(L, B, E)
    given, hidden = padding(L, padded)
    mask = attn_mask(masks, L, L)
    if padded == "bool" and masks in ("2-D float", "3-D float"):
        given = torch.zeros(B, L).masked_fill(hidden, -math.inf)  # torch wants both of one type
    if padded == "float" and masks is not None and "bool" in masks:
        given = hidden
    check(mha, x, x, x, valid=~hidden, key_padding_mask=given, attn_mask=mask)


@pytest.mark.parametrize("batch_first", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dims", [pytest.param({}, marks=pytest.mark.slow), {"kdim": 10, "vdim": 14}])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}])
def test_cross_attention(extra, dims, batch_first):
    if "add_bias_kv" in extra and dims:
        pytest.skip("torch does not allow this")
    mha = nn.MultiheadAttention(E, H, batch_first=batch_first, **extra, **dims)
    sizes = (dims.get("kdim", E), dims.get("vdim", E))
    query, key, value = draw(B, L, E), draw(B, S, sizes[0], seed=2), draw(B, S, sizes[1], seed=3)
    if not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    given, _ = padding(S, "bool")
    check(mha, query, key, value, key_padding_mask=given, attn_mask=attn_mask("2-D bool", L, S))
    check(mha, query, key, value, attn_mask=attn_mask("3-D float", L, S))


@pytest.mark.parametrize("extra", [("add_bias_kv",), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")])
@pytest.mark.parametrize("padded", [pytest.param(None, marks=pytest.mark.slow), "bool"])
def test_more_keys_in_self_attention(extra, padded):
    """A query of padding is left out, although there is a key more than queries."""
    x = draw(L, B, E)
    for masks in (None, "2-D bool", "2-D float"):
        given, hidden = padding(L, padded)
        if padded and masks == "2-D float":
            given = torch.zeros(B, L).masked_fill(hidden, -math.inf)
        mha = nn.MultiheadAttention(E, H, **dict.fromkeys(extra, True))
        check(mha, x, x, x, key_padding_mask=given, attn_mask=attn_mask(masks, L, L), valid=~hidden)


def test_cross_attention_of_equal_lengths_excludes_no_query():
    query, key = draw(L, B, E), draw(L, B, E, seed=2)
    given, _ = padding(L, "bool")
    check(nn.MultiheadAttention(E, H), query, key, key, key_padding_mask=given)


@pytest.mark.parametrize("batch_first", [False, True])
def test_positions_added_to_queries_and_keys_alone_are_no_cross_attention(batch_first):
    with_positions, x = draw(L, L, E), draw(L, L, E, seed=2)[:, :L]
    given = torch.arange(L)[None] >= torch.tensor([L - 2] * L)[:, None]
    mha = nn.MultiheadAttention(E, H, batch_first=batch_first)
    check(mha, with_positions, with_positions, x, key_padding_mask=given, valid=~given)


def test_causal_hint_goes_with_its_mask():
    x = draw(L, B, E)
    check(nn.MultiheadAttention(E, H), x, x, x, attn_mask=attn_mask("2-D bool", L, L), is_causal=True)


def test_causal_without_weights_needs_no_mask_at_all():
    mha = nn.MultiheadAttention(E, H)
    x = draw(L, B, E)
    model = randomize(Holder(mha, attn_mask=attn_mask("2-D bool", L, L), is_causal=True, need_weights=False), std=0.4)
    with torch.no_grad():
        weights = mha(x, x, x, attn_mask=attn_mask("2-D bool", L, L), average_attn_weights=False)[1]
    snapshot, _ = watched(model, x, x, x)
    assert_heads(snapshot["entropy"]["mha"], entropy(weights))


@pytest.mark.parametrize("masks", [None, "2-D float"])
def test_unbatched(masks):
    x = draw(L, E)
    check(nn.MultiheadAttention(E, H), x, x, x, attn_mask=attn_mask(masks, L, L))
    key = draw(S, E, seed=3)
    check(nn.MultiheadAttention(E, H), x, key, key, key_padding_mask=torch.arange(S) >= 6)


@pytest.mark.parametrize("masks", [None, "bool", "bool by head", "float"])
@pytest.mark.parametrize("separate", [False, True])
def test_the_function_called_directly(separate, masks):
    """nn.MultiheadAttention makes float masks of bool ones before it gets here; others do not."""
    keys = L - 2
    mask = {
        None: None,
        "bool": attn_mask("2-D bool", L, L)[:, :keys],
        "bool by head": attn_mask("3-D bool", L, keys),
        "float": attn_mask("3-D float", L, keys),
    }[masks]
    given = None if masks is None or masks == "float" else padding(keys, "bool")[0]

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(E, H, kdim=10 if separate else None)

        def forward(self, query, key):
            m = self.inner
            weights = [m.q_proj_weight, m.k_proj_weight, m.v_proj_weight]
            value = query[: key.shape[0]] if separate else key
            output, self.weights = F.multi_head_attention_forward(
                query, key, value, E, H, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight,
                m.out_proj.bias, training=False, need_weights=True, average_attn_weights=False, attn_mask=mask,
                key_padding_mask=given, use_separate_proj_weight=separate,
                **dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True)),
            )  # fmt: skip
            return output

    model = randomize(nn.Sequential(Functional()), std=0.4)
    query, key = draw(L, B, E), draw(keys, B, 10 if separate else E, seed=2)
    snapshot, coverage = watched(Both(model[0]), query, key)
    (path,) = snapshot.modules
    assert (coverage[path].heads, coverage[path].kind) == (H, "cross")
    assert_heads(snapshot["entropy"][path], entropy(model[0].weights))


class Both(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, query, key):
        return self.inner(query, key)


def test_static_keys_are_refused():
    class Static(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(E, H)

        def forward(self, x):
            m = self.attention
            static = torch.zeros(B * H, L, E // H)
            return F.multi_head_attention_forward(
                x, x, x, E, H, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight,
                m.out_proj.bias, static_k=static, static_v=static,
            )[0]  # fmt: skip

    with pytest.warns(attnmon.AttnmonWarning, match="static_k"):
        snapshot, coverage = watched(Static(), draw(L, B, E))
    assert snapshot is None
    assert any("static_k" in record.reason for record in coverage.values())


def test_few_sequences_are_projected():
    """The projections that attnmon makes again are of the sampled sequences alone."""
    mha = nn.MultiheadAttention(E, H, batch_first=True)
    model = randomize(Holder(mha), std=0.4)
    x = draw(16, L, E)
    sizes, linear = [], F.linear

    def counting(tensor, *args):
        sizes.append(tensor.shape[1])
        return linear(tensor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnmon.capture.routes.torch_calls.F.linear", counting)
        snapshot, _ = watched(model, x, x, x, options={"sequences": 2})
    assert sizes[-3:] == [2, 2, 2]
    assert (snapshot.rows["mha"] == 2 * L).all()


# -- nn.Transformer --------------------------------------------------------------------------------------------


def returned(model, *args, **kwargs):
    """Weights of every MultiheadAttention, by path, each computed by itself from what its module was given."""
    found = {}

    def hook(path):
        def called(module, given, named, output):
            with torch.no_grad():
                found[path] = F.multi_head_attention_forward(
                    *[x.transpose(0, 1) if module.batch_first else x for x in given], E, H, module.in_proj_weight,
                    module.in_proj_bias, None, None, False, 0.0, module.out_proj.weight, module.out_proj.bias,
                    training=False, key_padding_mask=named.get("key_padding_mask"), attn_mask=named.get("attn_mask"),
                    average_attn_weights=False,
                )[1]  # fmt: skip

        return called

    handles = [
        module.register_forward_hook(hook(path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    ]
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_encoder_and_decoder(batch_first, norm_first):
    torch.manual_seed(0)
    model = nn.Transformer(
        E, H, 2, 2, dim_feedforward=16, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    ).train()  # fmt: skip
    randomize(model, std=0.4).train()
    source, target = draw(B, S, E), draw(B, L, E, seed=2)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    given, hidden = padding(S, "bool")
    options = {
        "src_key_padding_mask": given, "memory_key_padding_mask": given,
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(L).isinf(), "tgt_is_causal": True,
    }  # fmt: skip
    weights = returned(model, source, target, **options)
    snapshot, coverage = watched(model, source, target, **options)
    assert set(coverage) == set(weights)
    assert len(weights) == 6
    for path, record in coverage.items():
        assert (record.status, record.heads, record.refused) == ("captured", H, {})
        assert record.kind == ("cross" if path.endswith("multihead_attn") else "self")
        valid = ~hidden if path.startswith("encoder") else None
        assert_heads(snapshot["entropy"][path], entropy(weights[path], valid), what=path)


def operators(run):
    """Names of the aten operators dispatched."""
    names = []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Keep():
        run()
    return names


@pytest.mark.parametrize("kind", ["mha", "layer", "encoder"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_fused_path_of_evaluation_stays(kind, context):
    if kind == "mha":
        model = Holder(nn.MultiheadAttention(E, H, batch_first=True), need_weights=False)
        args = (draw(B, L, E),) * 3
    else:
        model = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
        if kind == "encoder":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = nn.TransformerEncoder(model, 2)
        args = (draw(B, L, E),)
    model.eval()

    def run():
        with context():
            model(*args)

    plain = operators(run)
    assert any("native_multi_head" in name or "transformer_encoder_layer_fwd" in name for name in plain)
    monitor = attnmon.watch(model, **EVERYTHING)
    with context(), pytest.warns(attnmon.AttnmonWarning, match="captured no attention call"), monitor.step():
        assert operators(run) == plain
    assert operators(run) == plain
    monitor.close()


def test_evaluation_between_measured_steps_keeps_the_fused_path():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2)
    x = draw(B, L, E)

    def evaluate():
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    plain = operators(evaluate)
    monitor = attnmon.watch(model, **EVERYTHING)
    for _ in range(2):
        with monitor.step():
            model(x).sum().backward()
            monitor.pause()
            assert operators(evaluate) == plain
            monitor.resume()
        assert operators(evaluate) == plain
    assert [record.calls for record in monitor.coverage()] == [2, 2]
    monitor.close()
