"""Attention spelled out in torch calls: what may lie between the product and the softmax, and after it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnmon
from attnmon.capture.routes.contractions import contracted_size, values_of
from tests.capture.weights import EVERYTHING, assert_heads, entropy, jacobian, of_rows, randomize, watched

B, H, L, D = 3, 4, 12, 6
WIDTH = H * D
CAUSAL = torch.tril(torch.ones(L, L, dtype=torch.bool))
PADDED = torch.arange(L)[None] >= torch.tensor([[L], [9], [5]])  # True = padding
SCALE = D**-0.5
LOWEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Projects, then runs the function under test on q, k, v [B, H, L, D]."""

    def __init__(self, function, heads=H, hint=True):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.function, self.heads = function, heads
        if hint:
            self.num_heads = heads
        else:
            del self.heads
            self._h = heads
        self.gain = nn.Parameter(torch.tensor(0.3))
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)
        with torch._C.DisableTorchFunction():
            self.seen = (q.detach().double(), k.detach().double(), v.detach().double())
        return self.function(self, q, k, v).reshape(B, L, -1)


def inputs(seed=1):
    return torch.randn(B, L, WIDTH, generator=torch.Generator().manual_seed(seed))


def measure(function, x=None, **options):
    torch.manual_seed(0)
    model = randomize(nn.Sequential(Attention(function, **options)), std=0.3)
    snapshot, coverage = watched(model, inputs() if x is None else x)
    return model[0], snapshot, coverage["0"]


def check(function, scale=SCALE, mask=None, valid=None, logits=None, rtol=1e-4, **options):
    """Entropies, Jacobian and geometry against float64 weights of ``scale * q.k`` under ``mask``."""
    layer, snapshot, record = measure(function, **options)
    q, k, _ = layer.seen
    z = scale * q @ k.mT if logits is None else logits(q, k)
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf)
    weights = z.softmax(-1).nan_to_num(0.0)
    assert (record.status, record.heads, record.calls, record.refused) == ("captured", H, 1, {})
    assert record.route == "eager"
    assert_heads(snapshot["entropy"]["0"], entropy(weights, valid), rtol, "entropy")
    tau = 1.0 / (scale * math.sqrt(D))
    assert_heads(snapshot["jacobian"]["0"], jacobian(weights, tau, valid), 5 * rtol, "jacobian")
    assert (snapshot.rows["0"] == (B * L if valid is None else int(valid.sum()))).all()
    largest = z.masked_fill(~valid[:, None, :, None], -math.inf) if valid is not None else z
    assert_heads(snapshot["max_logit"]["0"], largest.amax((0, 2, 3)), rtol, "max_logit")
    assert "0" in snapshot["distance"]  # the values were found
    return layer, snapshot


# -- the product -----------------------------------------------------------------------------------------------

PRODUCTS = {
    "at": lambda m, q, k, v: (q @ k.transpose(-1, -2) * SCALE).softmax(-1) @ v,
    "matmul": lambda m, q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.mT) * SCALE, dim=-1), v),
    "method": lambda m, q, k, v: q.matmul(k.mT).mul(SCALE).softmax(dim=-1).matmul(v),
    "keywords": lambda m, q, k, v: torch.matmul(
        input=torch.softmax(input=torch.mul(torch.matmul(input=q, other=k.mT), SCALE), dim=-1), other=v
    ),
    "einsum": lambda m, q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE).softmax(-1), v
    ),
    "einsum, list": lambda m, q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", [torch.softmax(torch.einsum("bhqd,bhkd->bhqk", [q, k]) * SCALE, -1), v]
    ),
    "einsum, ellipsis": lambda m, q, k, v: torch.einsum(
        "... i j, ... j d -> ... i d", (torch.einsum("... i d, ... j d -> ... i j", q, k) * SCALE).softmax(-1), v
    ),
    "einsum, keys first": lambda m, q, k, v: torch.einsum(
        "bhkd,bhqk->bqhd", v, (torch.einsum("bhkd,bhqd->bhqk", k, q) * SCALE).softmax(-1)
    ),
    "einsum, length before heads": lambda m, q, k, v: torch.einsum(
        "bhqk,bkhd->bqhd",
        (torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) * SCALE).softmax(-1), v.transpose(1, 2),
    ),
    "bmm": lambda m, q, k, v: (
        torch.bmm((torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * SCALE).softmax(-1), v.flatten(0, 1))
    ),
    "baddbmm": lambda m, q, k, v: (
        torch.baddbmm(
            torch.zeros(B * H, L, L), q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=SCALE
        ).softmax(-1) @ v.flatten(0, 1)
    ),
    "baddbmm, method": lambda m, q, k, v: (
        torch.zeros(B * H, L, L).baddbmm(batch1=q.flatten(0, 1), batch2=k.flatten(0, 1).mT, alpha=SCALE).softmax(-1)
        @ v.flatten(0, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    check(PRODUCTS[name])


def test_queries_made_by_a_product():
    """Projections by einsum look like products of queries and keys, too."""

    def function(m, q, k, v):
        identity = torch.eye(D).expand(H, D, D)
        q = torch.einsum("bhld,hde->bhle", q, identity) * SCALE
        k = torch.einsum("bhld,hde->bhle", k, identity)
        return (q @ k.mT).softmax(-1) @ v

    check(function)


# -- the scale -------------------------------------------------------------------------------------------------


def scaled(logits):
    return lambda m, q, k, v: logits(m, q, k).softmax(-1) @ v


def divided_in_place(m, q, k):
    scores = q @ k.mT
    scores /= math.sqrt(D)
    return scores


def rotated(q):
    first, second = q.chunk(2, dim=-1)
    return q * torch.cos(torch.ones(L, 1)) + torch.cat((-second, first), dim=-1) * torch.sin(torch.ones(L, 1))


SCALES = {
    "none": (1.0, lambda m, q, k: q @ k.mT),
    "multiply": (0.2, lambda m, q, k: torch.mul(q @ k.mT, 0.2)),
    "multiply from the left": (0.2, lambda m, q, k: 0.2 * (q @ k.mT)),
    "divide": (0.2, lambda m, q, k: q @ k.mT / 5.0),
    "torch.div": (0.2, lambda m, q, k: torch.div(q @ k.mT, 5.0)),
    "divide in place": (SCALE, divided_in_place),
    "twice": (0.1, lambda m, q, k: 0.2 * (q @ k.mT) / 2),
    "queries": (0.2, lambda m, q, k: (q * 0.2) @ k.mT),
    "keys": (0.2, lambda m, q, k: q @ (k / 5.0).mT),
    "both": (0.2, lambda m, q, k: (q * 0.2**0.5) @ (k * 0.2**0.5).mT),
    "queries and product": (0.1, lambda m, q, k: ((q * 0.2) @ k.mT) / 2.0),
    "queries, then moved": (0.2, lambda m, q, k: (0.2 * q).transpose(1, 2).contiguous().transpose(1, 2) @ k.mT),
    "queries, then cut": (0.2, lambda m, q, k: torch.cat((q * 0.2).split(3, dim=-1), dim=-1) @ k.mT),
    "0-dim tensor": (0.2, lambda m, q, k: q @ k.mT * torch.tensor(0.2)),
    "0-dim tensor on queries": (0.2, lambda m, q, k: (q * torch.tensor(0.2)) @ k.mT),
    "divide by a tensor": (SCALE, lambda m, q, k: q @ k.mT / torch.sqrt(torch.tensor(float(D)))),
    "one-element parameter": (0.3, lambda m, q, k: q @ k.mT * m.gain),
    "added after": (0.2, lambda m, q, k: 0.2 * (q @ k.mT) + 0.0),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales(name):
    scale, logits = SCALES[name]
    check(scaled(logits), scale=scale)


def test_a_scale_given_before_a_rotation():
    check(
        lambda m, q, k, v: (rotated(q * 0.2) @ rotated(k).mT).softmax(-1) @ v,
        scale=0.2, logits=lambda q, k: 0.2 * rotated(q) @ rotated(k).mT,
    )  # fmt: skip


def test_what_is_scaled_before_its_projection_is_no_scale():
    project = nn.Linear(D, D, bias=False)
    with torch.no_grad():
        project.weight.copy_(torch.eye(D))
    check(lambda m, q, k, v: (project(q * 3.0) @ k.mT).softmax(-1) @ v, scale=1.0, logits=lambda q, k: 3.0 * q @ k.mT)


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (lambda m, q, k: q @ k.mT * torch.rand(H, 1, 1), "not known to the host"),
        (lambda m, q, k: q @ k.mT * -1.0, "not positive"),
        (lambda m, q, k: (q @ k.mT) * 0.2 + (k @ q.mT) * 0.3, "not known to the host"),
    ],
    ids=["by head", "negative", "two products"],
)
def test_a_scale_that_is_no_number_is_refused(logits, reason):
    with pytest.warns(attnmon.AttnmonWarning, match=reason):
        _, snapshot, record = measure(scaled(logits))
    assert snapshot is None
    assert record.status == "skipped"
    assert reason in record.reason


# -- masks and biases ------------------------------------------------------------------------------------------


def additive(mask, value, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, value)


def assigned(m, q, k, v):
    scores = q @ k.mT * SCALE
    scores[:, :, ~CAUSAL] = -math.inf
    return scores.softmax(-1) @ v


def added_in_place(m, q, k, v):
    scores = q @ k.mT * SCALE
    scores += additive(CAUSAL, -1e9)
    return scores.softmax(-1) @ v


MASKS = {
    "masked_fill -inf": lambda s: s.masked_fill(~CAUSAL, -math.inf),
    "masked_fill_ -inf": lambda s: s.masked_fill_(~CAUSAL, -math.inf),
    "masked_fill finfo.min": lambda s: torch.masked_fill(s, ~CAUSAL, LOWEST),
    "masked_fill -1e9": lambda s: s.masked_fill(~CAUSAL, -1e9),
    "where -inf": lambda s: torch.where(CAUSAL, s, -math.inf),
    "where finfo.min": lambda s: torch.where(CAUSAL, s, torch.full([], LOWEST)),
    "where, condition by name": lambda s: torch.where(condition=CAUSAL, input=s, other=torch.tensor(-1e9)),
    "where, method": lambda s: s.where(CAUSAL, torch.tensor(-math.inf)),
    "add -inf": lambda s: s + additive(CAUSAL, -math.inf),
    "add finfo.min": lambda s: torch.add(s, additive(CAUSAL, LOWEST)),
    "add from the left": lambda s: additive(CAUSAL, -1e9) + s,
    "subtract 1e9": lambda s: s - 1e9 * (~CAUSAL).float(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check(lambda m, q, k, v: MASKS[name](q @ k.mT * SCALE).softmax(-1) @ v, mask=CAUSAL)


@pytest.mark.parametrize("function", [assigned, added_in_place])
def test_masks_written_in_place(function):
    check(function, mask=CAUSAL)


@pytest.mark.parametrize("value", [-math.inf, LOWEST, -1e9])
def test_padding_queries_are_excluded(value):
    keys = ~PADDED[:, None, None, :]
    _, snapshot = check(
        lambda m, q, k, v: (q @ k.mT * SCALE + additive(keys, value)).softmax(-1) @ v, mask=keys, valid=~PADDED
    )
    assert (snapshot.excluded_by_reason["padding"]["0"] == int(PADDED.sum())).all()


def test_minus_ten_thousand_is_a_bias_that_no_weight_survives():
    """Not a mask by the definitions; the weights and their entropy are the model's own all the same."""
    layer, snapshot, record = measure(lambda m, q, k, v: (q @ k.mT * SCALE + additive(CAUSAL, -1e4)).softmax(-1) @ v)
    q, k, _ = layer.seen
    weights = (SCALE * q @ k.mT).masked_fill(~CAUSAL, -math.inf).softmax(-1)
    assert_heads(snapshot["entropy"]["0"], entropy(weights))
    assert record.status == "captured"


def test_a_mask_after_the_softcap_and_a_bias_by_head():
    bias = torch.randn(1, H, L, L, generator=torch.Generator().manual_seed(7))

    def logits(q, k):
        return 1.5 * torch.tanh(SCALE * q @ k.mT / 1.5) + bias.to(q.dtype)

    check(
        lambda m, q, k, v: (logits(q, k)).masked_fill(~CAUSAL, LOWEST).softmax(-1) @ v, logits=logits, mask=CAUSAL
    )  # the cap's own factors cancel


# -- the softmax and what follows ------------------------------------------------------------------------------

SOFTMAXES = {
    "torch": lambda m, s: torch.softmax(s, -1),
    "torch, axis by number": lambda m, s: torch.softmax(s, dim=3),
    "functional": lambda m, s: F.softmax(s, dim=-1),
    "upcast": lambda m, s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "upcast before": lambda m, s: torch.softmax(s.float(), dim=-1).type_as(s),
    "positional dtype": lambda m, s: torch.softmax(s, -1, torch.float64).float(),
    "special": lambda m, s: torch.special.softmax(s, dim=-1),
    "module": lambda m, s: m.softmax(s),
    "module and dropout": lambda m, s: m.dropout(m.softmax(s)),
    "dropout by name": lambda m, s: F.dropout(input=s.softmax(-1), p=0.0, training=m.training),
    "minus the maximum": lambda m, s: (s - s.max(dim=-1, keepdim=True).values).softmax(-1),
    "minus the maximum, detached": lambda m, s: (s - s.amax(-1, keepdim=True).detach()).softmax(-1),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes(name):
    check(lambda m, q, k, v: SOFTMAXES[name](m, q @ k.mT * SCALE) @ v)


def kept_aside(m, q, k, v):
    scores = q @ k.mT
    m.raw = scores.clone()
    scores = scores * SCALE
    m.logits = scores.detach()
    weights = scores.softmax(-1)
    m.weights = weights.detach()
    shown = weights.view(B * H, L, L)
    m.shown = shown.view(B, H, L, L)
    return shown @ v.flatten(0, 1)


def grouped(m, q, k, v):
    """Two groups of keys with two heads each, five axes."""
    q, k, v = q.unflatten(1, (2, 2)), k[:, :2, None], v[:, :2, None]
    return (q @ k.mT * SCALE).softmax(-1) @ v


def grouped_einsum(m, q, k, v):
    weights = (torch.einsum("bghqd,bgkd->bghqk", q.unflatten(1, (2, 2)), k[:, :2]) * SCALE).softmax(-1)
    return torch.einsum("bghqk,bgkd->bqghd", weights, v[:, :2])


def folded(m, q, k, v):
    q, k, v = (x.reshape(B * H, L, D) for x in (q, k, v))
    scores = torch.bmm(q * SCALE, k.transpose(1, 2)).view(B, H, L, L)
    scores = scores.view(B * H, L, L)
    return torch.bmm(F.dropout(F.softmax(scores, dim=-1), p=0.0), v)


def windows(m, q, k, v):
    """A window is a sequence: [B, windows, H, l, l]."""
    q, k, v = (x.unflatten(2, (2, L // 2)).transpose(1, 2) for x in (q, k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


def test_tensors_kept_aside_do_not_lead_astray():
    check(kept_aside)


@pytest.mark.parametrize("hint", [True, False])
def test_heads_folded_into_sequences(hint):
    check(folded, hint=hint)


@pytest.mark.parametrize("function", [grouped, grouped_einsum])
@pytest.mark.parametrize("hint", [True, False])
def test_groups_of_heads(function, hint):
    check(function, hint=hint, logits=lambda q, k: SCALE * q @ k[:, [0, 0, 1, 1]].mT)


def test_windows_are_sequences():
    layer, snapshot, record = measure(windows)
    q, k, _ = (x.unflatten(2, (2, L // 2)).transpose(1, 2).flatten(0, 1) for x in layer.seen)
    assert (record.heads, record.refused) == (H, {})
    assert_heads(snapshot["entropy"]["0"], entropy((SCALE * q @ k.mT).softmax(-1)))
    assert (snapshot.rows["0"] == B * L).all()


def test_values_change_the_geometry_as_they_should():
    """Values found in the wrong order would leave entropies alone."""
    expected = measure(PRODUCTS["at"])[1]
    for name in PRODUCTS:
        snapshot = measure(PRODUCTS[name])[1]
        for metric in ("distance", "separability"):
            assert_heads(snapshot[metric]["0"], torch.from_numpy(expected[metric]["0"]), what=f"{name} {metric}")
    for function in (kept_aside, folded):
        assert_heads(measure(function)[1]["distance"]["0"], torch.from_numpy(expected["distance"]["0"]))


# -- learned sinks ---------------------------------------------------------------------------------------------

SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])


def with_sink(join, drop):
    def function(m, q, k, v):
        joined = join((q @ k.mT * SCALE).masked_fill(~CAUSAL, LOWEST))
        joined = joined - joined.max(dim=-1, keepdim=True).values
        return drop(joined.softmax(-1)) @ v

    return function


def column(sinks=SINK):
    return sinks.view(1, H, 1, 1).expand(B, H, L, 1)


SINKS = {
    "last": (SINK, lambda s: torch.cat([s, column()], dim=-1), lambda p: p[..., :-1]),
    "first": (SINK, lambda s: torch.cat((column(), s), -1), lambda p: p[..., 1:]),
    "copied": (SINK, lambda s: torch.concat([s, column().contiguous()], dim=3), lambda p: p.narrow(-1, 0, L)),
    "split off": (SINK, lambda s: torch.cat([s, column()], dim=-1), lambda p: p.split([L, 1], dim=-1)[0]),
    "off by one": (SINK * 0, lambda s: F.pad(s, (0, 1)), lambda p: p[..., :L]),
    "off by one, zeros": (
        SINK * 0, lambda s: torch.cat([torch.zeros_like(s[..., :1]), s], dim=-1), lambda p: p[:, :, :, 1:],
    ),
    "padded by a number": (SINK * 0 - 0.7, lambda s: F.pad(s, (1, 0), value=-0.7), lambda p: p[..., 1:]),
}  # fmt: skip


@pytest.mark.parametrize("name", SINKS)
def test_a_column_without_a_key_is_a_sink(name):
    sinks, join, drop = SINKS[name]
    layer, snapshot, record = measure(with_sink(join, drop))
    q, k, _ = layer.seen
    z = (SCALE * q @ k.mT).masked_fill(~CAUSAL, -math.inf)
    weights = torch.cat([z, column(sinks.double())], dim=-1).softmax(-1)
    assert (record.status, record.heads, record.refused) == ("captured", H, {})
    assert_heads(snapshot["entropy"]["0"], entropy(weights))
    assert_heads(snapshot["sink_mass"]["0"], of_rows(weights[..., -1], None))
    assert_heads(snapshot["max_logit"]["0"], z.amax((0, 2, 3)))
    assert_heads(snapshot["first_mass"]["0"], of_rows(weights[..., 0], None))
    assert "0" in snapshot["distance"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda m, q, k, v: (
                torch.cat([q @ k.mT, q[..., :1]], dim=-1).softmax(-1)[..., :-1] @ v
            ),
            "differs from row to row",
        ),
        (
            lambda m, q, k, v: (
                torch.cat([q @ k.mT, column()], dim=-1).softmax(-1) @ torch.cat([v, v[:, :, :1]], dim=2)
            ),
            "values of its own",
        ),
        (lambda m, q, k, v: F.pad(q @ k.mT, (1, 1)).softmax(-1)[..., 1:-1] @ v, "padded"),
        (
            lambda m, q, k, v: (
                torch.cat([q @ k.mT, column()], -1).masked_fill(F.pad(~CAUSAL, (0, 1)), LOWEST).softmax(-1)[..., :L]
                @ v
            ),
            "after a sink",
        ),
    ],
    ids=["of the query", "with a value", "two", "masked later"],
)  # fmt: skip
def test_other_columns_are_refused(function, reason):
    with pytest.warns(attnmon.AttnmonWarning, match=reason):
        _, snapshot, record = measure(function)
    assert snapshot is None
    assert reason in record.reason


def test_keys_of_two_sources_are_keys():
    def function(m, q, k, v):
        own, memory = q @ k.mT * SCALE, q @ (-k[:, :, :5]).mT * SCALE
        return torch.cat([memory, own], dim=-1).softmax(-1) @ torch.cat([v[:, :, :5], v], dim=2)

    layer, snapshot, record = measure(function)
    q, k, _ = layer.seen
    weights = (SCALE * q @ torch.cat([-k[:, :, :5], k], dim=2).mT).softmax(-1)
    assert record.kind == "self"
    assert_heads(snapshot["entropy"]["0"], entropy(weights))
    assert_heads(snapshot["jacobian"]["0"], jacobian(weights, 1.0), 5e-4)


# -- half precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_of_half_precision(dtype):
    """The softmax's own input is measured: rounding makes ties that no recomputed product would have."""

    def function(m, q, k, v):
        m.logits = (q.to(dtype) @ k.to(dtype).mT * 8.0 * SCALE).masked_fill(~CAUSAL, torch.finfo(dtype).min)
        return (F.softmax(m.logits, dim=-1, dtype=torch.float32).to(dtype) @ v.to(dtype)).float()

    layer, snapshot, _ = measure(function)
    weights = layer.logits.detach().double().softmax(-1)
    assert_heads(snapshot["entropy"]["0"], entropy(weights))
    assert_heads(snapshot["jacobian"]["0"], jacobian(weights, 1.0 / (8.0 * SCALE * math.sqrt(D))), 5e-4)


def test_overflow_to_infinity_is_counted_and_left_out():
    def function(m, q, k, v):
        q = torch.cat([q[:, :, :1] * 0 + 3e4, q[:, :, 1:]], dim=2).half()
        k = (k.half() if m.num_heads else k).abs()
        m.logits = q @ k.mT
        return (m.logits.float().softmax(-1).nan_to_num() @ v).float()

    layer, snapshot, record = measure(function)
    broken = ~layer.logits.isfinite().all(-1)
    assert broken[:, :, 0].all()
    assert record.status == "captured"
    assert (snapshot.excluded_by_reason["nonfinite"]["0"] == broken.sum((0, 2)).numpy()).all()
    weights = layer.logits.detach().double()[:, :, 1:].softmax(-1)
    assert not broken[:, :, 1:].any()
    assert_heads(snapshot["entropy"]["0"], entropy(weights))


# -- what is no attention --------------------------------------------------------------------------------------


class Router(nn.Module):
    """A mixture of experts; its logits are products, its softmax weighs no values."""

    def __init__(self, how):
        super().__init__()
        self.gate, self.how = nn.Parameter(torch.zeros(WIDTH, 5)), how

    def forward(self, x):
        if self.how == "flat":
            probs = (x.flatten(0, 1) @ self.gate).softmax(-1).unflatten(0, (B, L))
        elif self.how == "bmm":
            probs = torch.bmm(x, self.gate.expand(B, -1, -1)).softmax(-1)
        elif self.how == "four axes":
            probs = (x[:, None] @ self.gate.expand(B, 1, WIDTH, 5)).softmax(-1)[:, 0]
        else:
            probs = torch.einsum("ble,ek->blk", x, self.gate).softmax(-1)
        return x * probs.topk(2, dim=-1).values.sum(-1, keepdim=True)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)

    def forward(self, x):
        words = self.words.weight.T
        return torch.softmax(x @ words, dim=-1), torch.bmm(x, words.expand(B, -1, -1)).softmax(-1)


@pytest.mark.filterwarnings("error::attnmon.AttnmonWarning")
@pytest.mark.parametrize("how", ["flat", "bmm", "four axes", "einsum"])
def test_routers_and_classifiers_are_no_attention(how):
    model = randomize(nn.Sequential(Attention(PRODUCTS["at"]), Router(how), Classifier()))
    monitor = attnmon.watch(model, **EVERYTHING)
    for _ in range(2):
        with monitor.step():
            model(inputs())
    assert [(record.path, record.status, record.refused) for record in monitor.coverage()] == [("0", "captured", {})]
    assert monitor.flush().modules == ("0",)
    monitor.close()


# -- small modules inside --------------------------------------------------------------------------------------


class ScaleMaskSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())

    def forward(self, scores):
        return (scores * SCALE).masked_fill(~CAUSAL, LOWEST).softmax(-1)


class CoreModule(nn.Module):
    """Given queries, keys and values."""

    def forward(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


def test_parts_of_attention_in_modules_of_their_own():
    class Split(Attention):
        def __init__(self):
            super().__init__(lambda m, q, k, v: m.weigh(q @ k.mT) @ v)
            self.weigh = ScaleMaskSoftmax()

    model = randomize(nn.Sequential(Split()), std=0.3)
    monitor = attnmon.watch(model, **EVERYTHING)
    for _ in range(2):
        with monitor.step():
            model(inputs())
    (record,) = monitor.coverage()
    assert (record.path, record.status, record.calls, record.refused) == ("0", "captured", 2, {})
    q, k, _ = model[0].seen
    weights = (SCALE * q @ k.mT).masked_fill(~CAUSAL, -math.inf).softmax(-1)
    snapshot = monitor.flush()
    assert_heads(snapshot["entropy"]["0"], entropy(weights))
    assert_heads(snapshot["jacobian"]["0"], jacobian(weights, 1.0), 5e-4)
    assert "0" in snapshot["distance"]


@pytest.mark.parametrize("name", ["product", "sdpa"])
def test_a_scale_given_outside_reaches_the_inner_module(name):
    class Inner(CoreModule):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, scale=1.0) if name == "sdpa" else super().forward(q, k, v)

    class Outer(Attention):
        def __init__(self):
            super().__init__(lambda m, q, k, v: m.core_attention(q * SCALE, k, v))
            self.core_attention = Inner()

    model = randomize(nn.Sequential(Outer()), std=0.3)
    snapshot, coverage = watched(model, inputs())
    (path,) = snapshot.modules
    assert coverage[path].status == "captured"
    q, k, _ = model[0].seen
    weights = (SCALE * q @ k.mT).softmax(-1)
    assert_heads(snapshot["jacobian"][path], jacobian(weights, 1.0), 5e-4)


def test_two_softmaxes_in_one_forward_merge_by_rows():
    def function(m, q, k, v):
        once = (q @ k.mT * SCALE).softmax(-1) @ v
        return (once @ k[:, :, :7].mT * SCALE).softmax(-1) @ v[:, :, :7]

    layer, snapshot, record = measure(function)
    q, k, v = layer.seen
    first = (SCALE * q @ k.mT).softmax(-1)
    second = (SCALE * first @ v @ k[:, :, :7].mT).softmax(-1)
    assert record.calls == 2
    assert_heads(snapshot["entropy"]["0"], (entropy(first) + entropy(second)) / 2)


# -- axes of einsum --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "left", "right", "expected"),
    [
        ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5), 5),
        ("...qd,...kd->...qk", (2, 3, 4, 5), (2, 3, 6, 5), 5),
        ("hqd,hkd->hkq", (3, 4, 5), (3, 6, 5), 5),
        ("bld,hde->bhle", (2, 4, 5), (3, 5, 6), 5),  # a projection; it reaches no softmax
        ("bhqk,bhqk->bhq", (2, 3, 4, 4), (2, 3, 4, 4), None),
        ("bqd,bkd->bq", (2, 3, 4), (2, 5, 4), None),
        ("bhqd->bhq", (2, 3, 4, 5), (1,), None),
    ],
)
def test_contracted_axes(equation, left, right, expected):
    assert contracted_size(equation, torch.zeros(left), torch.zeros(right)) == expected


def test_values_in_the_order_of_the_weights():
    v = torch.randn(2, 6, 3, 5)  # [B, K, H, D]
    probs = torch.zeros(2, 3, 4, 6)
    assert torch.equal(values_of("bhqk,bkhd->bqhd", probs, v, left_is_probs=True), v.transpose(1, 2))
    assert torch.equal(values_of("bkhd,bhqk->bqhd", v, probs, left_is_probs=False), v.transpose(1, 2))
    assert values_of("bhqk,bkd->bhqd", probs, v[:, :, 0], left_is_probs=True).shape == (2, 1, 6, 5)
    assert values_of("bhqk,bhqk->bhq", probs, probs, left_is_probs=True) is None
    assert values_of(None, v, probs, left_is_probs=False) is None
