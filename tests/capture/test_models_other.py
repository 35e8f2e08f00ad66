"""Vision models of transformers, x-transformers, and attention as people write it themselves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnmon
from tests.capture.weights import EVERYTHING, assert_heads, entropy, jacobian, of_rows, randomize, watched

WIDTH, HEADS, LENGTH, BATCH = 24, 3, 14, 3
CAUSAL = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))


# -- transformers: vision ---------------------------------------------------------------------------------------


def vision(name, attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    picture = {"image_size": 32, "patch_size": 8}
    config = {
        "vit": lambda: transformers.ViTConfig(**shared, **picture, hidden_dropout_prob=0.0),
        "clip": lambda: transformers.CLIPConfig(
            text_config={
                **shared, "vocab_size": 90, "max_position_embeddings": 32, "eos_token_id": 89, "bos_token_id": 1,
                "pad_token_id": 1,
            },
            vision_config={**shared, **picture, "num_attention_heads": 2}, projection_dim=16,
        ),
        "swin": lambda: transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
            drop_path_rate=0.0,
        ),
    }[name]()  # fmt: skip
    config._attn_implementation = attention
    model = {"vit": "ViTModel", "clip": "CLIPModel", "swin": "SwinModel"}[name]
    return randomize(getattr(transformers, model)(config))


VISION = {
    "vit": {f"layers.{layer}.attention": 4 for layer in range(2)},
    "clip": {f"text_model.encoder.layers.{layer}.self_attn": 4 for layer in range(2)}
    | {f"vision_model.encoder.layers.{layer}.self_attn": 2 for layer in range(2)},
    "swin": {
        f"encoder.layers.{stage}.blocks.{block}.attention": 2 << stage for stage in range(2) for block in range(2)
    },
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", VISION)
def test_vision_models(name, attention):
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))}
    padding = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    if name == "clip":
        inputs |= {
            "input_ids": torch.randint(2, 88, (2, 12), generator=torch.Generator().manual_seed(6)),
            "attention_mask": padding,
        }
    twin, weights = vision(name, "eager"), {}
    for path in VISION[name]:
        twin.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: weights.__setitem__(path, output[1])
        )
    with torch.no_grad():
        twin(**inputs)
    snapshot, coverage = watched(vision(name, attention), **inputs)
    assert {path: record.heads for path, record in coverage.items()} == VISION[name]
    for path, record in coverage.items():
        assert (record.status, record.kind, record.refused) == ("captured", "self", {})
        valid = padding.bool() if "text" in path else None
        assert_heads(snapshot["entropy"][path], entropy(weights[path], valid), what=path)
        assert_heads(snapshot["jacobian"][path], jacobian(weights[path], 1.0, valid), rtol=3e-4, what=path)
        assert (snapshot.rows[path] == (20 if "text" in path else math.prod(weights[path].shape[::2]))).all()
        assert path in snapshot["separability"]


# -- written here -----------------------------------------------------------------------------------------------


class Written(nn.Module):
    """An attention layer that keeps its own weights for the test, made by ``F.softmax`` on dense logits."""

    def __init__(self):
        super().__init__()
        self.weights = None

    def keep(self, logits):
        with torch._C.DisableTorchFunction():  # not part of the model
            self.weights = logits.detach().double().softmax(-1)


class NanoGPT(Written):
    def __init__(self, flash):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(0.0)
        self.n_head, self.n_embd, self.flash, self.dropout = HEADS, WIDTH, flash, 0.0
        self.register_buffer("bias", CAUSAL.float().view(1, 1, LENGTH, LENGTH))
        self.tau = 1.0

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        if self.flash:
            with torch.no_grad():
                self.keep(att)
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
            )
        else:
            self.keep(att)
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class CausalSelfAttention(NanoGPT):
    pass


class LitGPTAttention(Written):
    """Grouped queries interleaved with their keys in one projection; scale and mask given to SDPA."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_query_groups, self.head_size = 4, 2, 8
        self.attn = nn.Linear(WIDTH, (self.n_head + 2 * self.n_query_groups) * self.head_size)
        self.proj = nn.Linear(self.n_head * self.head_size, WIDTH)
        self.tau = 1.0 / (0.2 * math.sqrt(8))

    def forward(self, x):
        B, T, _ = x.size()
        q_per_kv = self.n_head // self.n_query_groups
        qkv = self.attn(x).view(B, T, self.n_query_groups, q_per_kv + 2, self.head_size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        k = k.expand(B, self.n_query_groups, q_per_kv, T, self.head_size).reshape(B, -1, T, self.head_size)
        v = v.expand(B, self.n_query_groups, q_per_kv, T, self.head_size).reshape(B, -1, T, self.head_size)
        q = q.reshape(B, -1, T, self.head_size)
        with torch.no_grad():
            self.keep((q @ k.mT * 0.2).masked_fill(~CAUSAL, -math.inf))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL[None, None], dropout_p=0.0, scale=0.2)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class TimmAttention(Written):
    def __init__(self, fused, qk_norm):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = HEADS, WIDTH // HEADS, fused
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.tau = 1.0

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            with torch.no_grad():
                self.keep(q @ k.transpose(-2, -1) * self.scale)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            self.keep(attn)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def hidden(seed=1, batch=BATCH, length=LENGTH):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_own_weights(model, snapshot, coverage, paths, heads, route=None):
    assert list(coverage) == list(paths)
    for path, record in coverage.items():
        layer = model.get_submodule(path)
        assert (record.status, record.kind, record.heads, record.refused) == ("captured", "self", heads, {})
        assert route is None or record.route == route
        assert_heads(snapshot["entropy"][path], entropy(layer.weights), what=path)
        expected = jacobian(layer.weights, layer.tau)
        assert_heads(snapshot["jacobian"][path], expected, rtol=3e-4, what=f"jacobian {path}")
        assert_heads(snapshot["first_mass"][path], of_rows(layer.weights[..., 0], None), what=path)
        assert path in snapshot["distance"]


WRITTEN = {
    "nanogpt": (lambda: CausalSelfAttention(flash=False), HEADS, "eager"),
    "nanogpt-flash": (lambda: CausalSelfAttention(flash=True), HEADS, "sdpa"),
    "litgpt": (LitGPTAttention, 4, "sdpa"),
    "timm": (lambda: TimmAttention(fused=False, qk_norm=False), HEADS, "eager"),
    "timm-norm": (lambda: TimmAttention(fused=False, qk_norm=True), HEADS, "eager"),
    "timm-fused": (lambda: TimmAttention(fused=True, qk_norm=False), HEADS, "sdpa"),
    "timm-fused-norm": (lambda: TimmAttention(fused=True, qk_norm=True), HEADS, "sdpa"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_as_people_write_it(name):
    layer, heads, route = WRITTEN[name]
    model = randomize(Stack(layer(), layer()))
    assert_own_weights(model, *watched(model, hidden()), [f"layers.{i}" for i in range(2)], heads, route)


def _mix(q, k, v, block):
    """Attention in a plain function."""
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    block.keep(logits)
    return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), v)


class Block(Written):
    """No class name says what happens here."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.tau = 1.0

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.mlp(_mix(q, k, v, self).transpose(1, 2).flatten(2))


class SdpaBlock(Block):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        with torch.no_grad():
            self.keep(q @ k.mT / math.sqrt(q.shape[-1]))
        return self.mlp(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A layer of a hybrid without attention."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("block", [Block, SdpaBlock])
def test_a_plain_function_is_reported_under_its_callers_path(block):
    model = randomize(Stack(block(), Convolution(), block()))
    monitor = attnmon.watch(model, **EVERYTHING)
    for _ in range(2):  # the second step watches only what made calls
        with monitor.step():
            model(hidden())
    coverage = {record.path: record for record in monitor.coverage()}
    assert [record.calls for record in coverage.values()] == [2, 2]
    assert_own_weights(model, monitor.flush(), coverage, ["layers.0", "layers.2"], HEADS)
    monitor.close()


class RecurrentMixer(Convolution):
    pass


def test_a_hybrid_has_nothing_to_report_of_layers_without_attention():
    model = randomize(Stack(CausalSelfAttention(False), Convolution(), RecurrentMixer(), TimmAttention(True, True)))
    snapshot, coverage = watched(model, hidden())
    assert_own_weights(model, snapshot, coverage, ["layers.0", "layers.3"], HEADS)
    assert snapshot.modules == ("layers.0", "layers.3")


class Head(Written):
    """One head a module, [B, T, T], as in lectures."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, 8, bias=False) for _ in range(3))
        self.tau = 1.0

    def forward(self, x):
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(~CAUSAL, float("-inf"))
        self.keep(wei[:, None])
        return F.softmax(wei, dim=-1) @ self.value(x)


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(3))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


def test_one_module_a_head():
    model = randomize(Stack(MultiHeadAttention()))
    snapshot, coverage = watched(model, hidden())
    assert_own_weights(model, snapshot, coverage, [f"layers.0.heads.{i}" for i in range(3)], 1)


# -- x-transformers ---------------------------------------------------------------------------------------------


def x_transformer(**options):
    x_transformers = pytest.importorskip("x_transformers")
    torch.manual_seed(1)
    model = x_transformers.TransformerWrapper(
        num_tokens=90, max_seq_len=32,
        attn_layers=x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options),
    )  # fmt: skip
    return randomize(model)


X_OPTIONS = {
    "default": {},
    "rotary": {"rotary_pos_emb": True},
    "one key head": {"attn_one_kv_head": True},
    "grouped": {"attn_kv_heads": 2},
    "sink": {"attn_head_learned_sink": True},
    "alibi": {"alibi_pos_bias": True},
    "flash": {"attn_flash": True},
    "flash rotary": {"attn_flash": True, "rotary_pos_emb": True},
    "flash grouped": {"attn_flash": True, "attn_kv_heads": 2},
    "flash qk norm": {"attn_flash": True, "attn_qk_norm": True, "attn_qk_norm_scale": 5},
    "qk norm": {"attn_qk_norm": True, "attn_qk_norm_scale": 5},
}


@pytest.mark.parametrize("name", X_OPTIONS)
def test_x_transformers(name):
    options = X_OPTIONS[name]
    ids = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(2))
    model = x_transformer(**options)
    twin = x_transformer(**{key: value for key, value in options.items() if key != "attn_flash"})
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        _, weights = twin(ids, return_attn=True)
    snapshot, coverage = watched(model, ids)
    captured = [record for record in coverage.values() if record.status == "captured"]
    assert len(captured) == len(coverage) == 2
    tau = 1.0 / (5 * math.sqrt(8)) if "norm" in name else 1.0
    for record, layer in zip(captured, weights, strict=True):
        assert (record.heads, record.kind, record.refused) == (4, "self", {})
        if name == "sink":
            layer = layer[..., 1:]
            assert_heads(snapshot["sink_mass"][record.path], of_rows(1.0 - layer.double().sum(-1), None))
        assert_heads(snapshot["entropy"][record.path], entropy(layer), what=name)
        assert_heads(snapshot["jacobian"][record.path], jacobian(layer, tau), rtol=3e-4, what=f"jacobian {name}")
        assert record.path in snapshot["separability"]


def test_what_is_not_seen_is_refused_and_named():
    """x-transformers clamps in a TorchScript function, which no mode looks into: whatever it does is not guessed."""
    ids = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(2))
    with pytest.warns(attnmon.AttnmonWarning, match="not see made from queries and keys"):
        snapshot, coverage = watched(x_transformer(attn_softclamp_logits=True), ids)
    assert snapshot is None
    assert {record.status for record in coverage.values()} == {"skipped"}
    inner = [record for path, record in coverage.items() if path.endswith(".attend")]
    assert ["did not see" in record.reason for record in inner] == [True, True]


def test_cross_attention_of_x_transformers():
    x_transformers = pytest.importorskip("x_transformers")
    torch.manual_seed(1)
    model = randomize(
        x_transformers.XTransformer(
            dim=32, enc_num_tokens=90, enc_depth=1, enc_heads=4, enc_max_seq_len=16, enc_attn_dim_head=8,
            dec_num_tokens=90, dec_depth=1, dec_heads=2, dec_max_seq_len=16, dec_attn_dim_head=8,
        )
    )  # fmt: skip
    seed = torch.Generator().manual_seed(2)
    for length in (16, 9):
        source = torch.randint(0, 90, (2, length), generator=seed)
        target = torch.randint(0, 90, (2, 10), generator=seed)
        _, coverage = watched(model, source, target)
        kinds = [(record.kind, record.heads, record.status) for record in coverage.values()]
        assert kinds == [("self", 4, "captured"), ("self", 2, "captured"), ("cross", 2, "captured")]
