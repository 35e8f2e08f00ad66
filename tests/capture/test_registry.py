"""Attention through the registry of transformers, flash kernels written out in its place."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import attnmon
from attnmon.capture.patching.replacement import Replacement
from tests.capture.flash_kernel import Kernel, over_sdpa
from tests.capture.weights import EVERYTHING, assert_heads, entropy, watched

modeling_utils = pytest.importorskip("transformers.modeling_utils")
flash_utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
REGISTRY = modeling_utils.ALL_ATTENTION_FUNCTIONS
TABLE = type(REGISTRY)._global_mapping

HEADS, KV_HEADS, DIM = 4, 2, 8

pytestmark = pytest.mark.filterwarnings("ignore::attnmon.AttnmonWarning")


class ToyAttention(nn.Module):
    """As attention modules of transformers call the interface; ``options`` are handed on."""

    is_causal = True

    def __init__(self, implementation, **options):
        super().__init__()
        self.implementation, self.options = implementation, options
        self.q, self.k, self.v = (nn.Linear(16, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def forward(self, x, mask=None, source=None, **kwargs):
        function = REGISTRY[self.implementation]
        source = x if source is None else source
        q, k, v = (
            layer(given).view(*given.shape[:2], -1, DIM).transpose(1, 2)
            for layer, given in ((self.q, x), (self.k, source), (self.v, source))
        )
        return function(self, q, k, v, mask, dropout=0.0, scaling=0.5, **self.options, **kwargs)[0].flatten(2)


class Toy(nn.Module):
    def __init__(self, implementation="flash_attention_2", layers=2, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ToyAttention(implementation, **options) for _ in range(layers))
        self.out = nn.Linear(HEADS * DIM, 16)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x, *args, **kwargs):
        for layer in self.layers:
            x = x[:, -kwargs.get("last", x.shape[1]) :] + self.out(layer(x, *args, **kwargs))
        return x


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        monkeypatch.setitem(TABLE, name, made.registered)
    return made


def inputs(batch=2, length=12):
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(1))


def assert_measured(model, kernel, *args, valid=None, captured=True, **kwargs):
    """Entropies are those of the weights the stand-in computed; output and registry are as without a monitor."""
    before, plain = dict(TABLE), model(*args, **kwargs)
    kernel.weights.clear()
    output = []
    hook = model.register_forward_hook(lambda module, given, result: output.append(result))
    snapshot, records = watched(model, *args, **kwargs)
    hook.remove()
    assert torch.equal(output[0], plain)
    assert dict(TABLE) == before
    for index, weights in enumerate(kernel.weights):
        path = f"layers.{index}"
        assert records[path].status == "captured", records[path].reason
        assert records[path].calls == 1
        assert_heads(snapshot["entropy"][path], entropy(weights, valid), what=path)
    return records


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_causal_and_grouped_heads(kernel, name):
    records = assert_measured(Toy(name), kernel, inputs())
    assert records["layers.0"].route == name
    assert records["layers.0"].heads == HEADS
    assert records["layers.0"].kind == "self"


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"softcap": 1.5},
        {"sliding_window": 4},
        {"sliding_window": 4, "is_causal": False},
        {"sliding_window": 12},  # not shorter than the keys: ignored
        {"s_aux": torch.linspace(0, 3, HEADS)},
        {"s_aux": torch.linspace(0, 3, HEADS), "sliding_window": 3, "softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_options(kernel, options, padding):
    x, mask = inputs(), None
    if padding != "none":
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, slice(0, 5) if padding == "left" else slice(7, 12)] = 0
    assert_measured(Toy(**options), kernel, x, mask, valid=mask)


@pytest.mark.parametrize("dense", [True, False])
def test_a_window_counts_tokens_not_padding_between_them(kernel, dense, monkeypatch):
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 4:7] = mask[1, 2] = mask[1, 9:] = False
    if not dense:
        monkeypatch.setattr("attnmon.capture.routes.transformers_registry._DENSE_ELEMENTS", 1)
    assert_measured(Toy(sliding_window=3), kernel, inputs(), mask, valid=mask)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}])
def test_fewer_queries_than_keys_align_at_the_end(kernel, options):
    class Late(ToyAttention):  # the last queries alone
        def forward(self, x):
            return super().forward(x[:, 7:], source=x)

    class LateAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Late("flash_attention_2", **options)

        def forward(self, x):
            return self.inner(x)

    model = LateAttention()
    snapshot, records = watched(model, inputs())
    assert records["inner"].status == "captured", records["inner"].reason
    assert_heads(snapshot["entropy"]["inner"], entropy(kernel.weights[0]))


def test_cross_attention(kernel):
    class Cross(ToyAttention):
        is_causal = False

        def forward(self, x, memory, mask=None):
            return super().forward(x, mask, source=memory)

    class CrossModel(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cross_attn = Cross("flash_attention_2")

        def forward(self, x, memory, mask=None):
            return self.cross_attn(x, memory, mask)

    snapshot, records = watched(CrossModel(), inputs(), inputs(length=5))
    assert records["cross_attn"].kind == "cross"
    assert_heads(snapshot["entropy"]["cross_attn"], entropy(kernel.weights[0]))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_by_boundaries(kernel, options, batch):
    bounds = torch.tensor([0, 5, 6, 12] if batch == 1 else [0, 5, 12, 20, 24], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 8, "max_length_k": 8}
    assert_measured(Toy(**options), kernel, inputs(batch), **lengths)


def test_packed_with_other_boundaries_for_keys_is_refused(kernel):
    lengths = {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "cu_seq_lens_k": torch.tensor([0, 6, 12])}
    _, records = watched(Toy(), inputs(1), options={"on_error": "warn"}, **lengths)
    assert "other boundaries" in records["layers.0"].reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"position_bias": torch.zeros(1, HEADS, 12, 12)}, "position_bias"),
        ({"head_mask": torch.ones(HEADS)}, "head_mask"),
        ({"block_indices": torch.zeros(3)}, "block_indices"),
        ({"mask": torch.zeros(2, 1, 12, 12)}, "a mask [2, 1, 12, 12]"),
    ],
)
def test_refused_with_a_reason(kernel, options, reason):
    with pytest.warns(attnmon.AttnmonWarning, match="not measured"):
        _, records = watched(Toy(), inputs(), options={"on_error": "warn"}, **options)
    assert records["layers.0"].status == "skipped"
    assert reason in records["layers.0"].reason


def test_arguments_that_say_nothing_of_the_weights(kernel):
    harmless = {"output_attentions": False, "num_items_in_batch": torch.tensor(3), "use_cache": True, "head_mask": None}
    assert_measured(Toy(), kernel, inputs(), **harmless)


# -- the function of transformers itself, over the package's functions ---------------------------------------


@pytest.fixture
def package(monkeypatch):
    """transformers' own flash_attention_forward, with the kernels written out."""
    made = Kernel()
    monkeypatch.setattr(flash_utils, "_loaded_implementation", "flash_attention_2")
    monkeypatch.setattr(flash_utils, "_flash_fn", made.flash_attn_func)
    monkeypatch.setattr(flash_utils, "_flash_varlen_fn", made.flash_attn_varlen_func)
    monkeypatch.setattr(flash_utils, "_pad_fn", flash_utils._pad_input)
    monkeypatch.setattr(flash_utils, "_unpad_fn", flash_utils._unpad_input)
    process = flash_utils._lazy_define_process_function(made.flash_attn_varlen_func)
    monkeypatch.setattr(flash_utils, "_process_flash_kwargs_fn", process)
    return made


def llama(layers=2, **options):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="eager", **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    model.config._attn_implementation = "flash_attention_2"
    return model.eval()


@pytest.mark.parametrize("sliding_window", [None, 4])
@pytest.mark.parametrize("padding", ["none", "left", "right", "between"])
def test_transformers_own_function(package, sliding_window, padding):
    model, ids = llama(sliding_window=sliding_window), torch.arange(24).view(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    hidden = {"none": slice(0, 0), "left": slice(0, 5), "right": slice(8, 12), "between": slice(3, 6)}[padding]
    mask[1, hidden] = 0
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
    package.weights.clear()
    snapshot, records = watched(model, ids, attention_mask=mask)
    weights = list(package.weights)
    assert len(weights) == 2
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, plain)
    for index, each in enumerate(weights):
        path = f"model.layers.{index}.self_attn"
        assert records[path].status == "captured", records[path].reason
        assert records[path].calls == 1
        assert_heads(snapshot["entropy"][path], entropy(each), what=path)


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_packed_by_positions_that_start_again(package, sliding_window):
    model, ids = llama(sliding_window=sliding_window), torch.arange(12)[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]])
    snapshot, records = watched(model, ids, position_ids=positions)
    for index, each in enumerate(package.weights):
        path = f"model.layers.{index}.self_attn"
        assert records[path].calls == 1, records[path].reason
        assert (each[0, :, 5:, :5] == 0).all()  # packed indeed
        assert_heads(snapshot["entropy"][path], entropy(each), what=path)


def test_one_sequence_alone_is_not_packed(package):
    snapshot, _ = watched(llama(), torch.arange(12)[None])
    assert_heads(snapshot["entropy"]["model.layers.0.self_attn"], entropy(package.weights[0]))


def test_training_step_is_bitwise_the_same(package):
    def train(monitored):
        model = llama().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = attnmon.watch(model, rules=(), on_error="raise") if monitored else None
        for _ in range(2):
            ids = torch.arange(24).view(2, 12)
            if monitor is None:
                model(ids, labels=ids).loss.backward()
                optimizer.step()
            else:
                with monitor.step():
                    model(ids, labels=ids).loss.backward()
                    optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            assert {record.status for record in monitor.coverage()} == {"captured"}
            monitor.close()
        return model.state_dict()

    plain, monitored = train(False), train(True)
    assert all(torch.equal(plain[name], monitored[name]) for name in plain)


# -- other implementations -----------------------------------------------------------------------------------


def test_an_implementation_over_sdpa_is_counted_once(monkeypatch):
    monkeypatch.setitem(TABLE, "mine", over_sdpa)
    snapshot, records = watched(Toy("mine"), inputs())
    assert records["layers.0"].calls == 1
    assert records["layers.0"].route == "sdpa"
    other, _ = watched(Toy("mine"), inputs())
    assert_heads(snapshot["entropy"]["layers.0"], torch.from_numpy(other["entropy"]["layers.0"]))


def test_a_flash_kernel_over_sdpa_is_counted_once(monkeypatch):
    monkeypatch.setitem(TABLE, "flash_attention_2", over_sdpa)
    through, records = watched(Toy("flash_attention_2"), inputs())
    assert records["layers.0"].calls == 1
    assert records["layers.0"].route == "flash_attention_2"
    monkeypatch.setitem(TABLE, "mine", over_sdpa)
    seen, _ = watched(Toy("mine"), inputs())
    assert_heads(through["entropy"]["layers.0"], torch.from_numpy(seen["entropy"]["layers.0"]))


@torch.library.custom_op("attnmon_tests::opaque", mutates_args=())
def opaque(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    logits = 0.5 * q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), float("-inf"))
    OPAQUE_WEIGHTS.append(logits.softmax(-1))
    return (OPAQUE_WEIGHTS[-1] @ v.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


@opaque.register_fake
def _(q, k, v, mask, causal):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


OPAQUE_WEIGHTS = []


def opaque_attention(module, query, key, value, attention_mask, **kwargs):
    causal = attention_mask is None and module.is_causal
    return opaque(query, key, value, attention_mask, causal), None


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_an_implementation_that_no_mode_sees_into(monkeypatch, kind):
    monkeypatch.setitem(TABLE, "mine", opaque_attention)
    mask = None
    if kind != "none":
        mask = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.6
        mask[..., 0] = True
        if kind == "float":
            mask = torch.where(mask, torch.randn(2, 1, 12, 12), torch.finfo(torch.float32).min)
    OPAQUE_WEIGHTS.clear()
    with torch.no_grad():
        snapshot, records = watched(Toy("mine", layers=1), inputs(), mask)
    assert records["layers.0"].route == "mine", records["layers.0"].reason
    assert_heads(snapshot["entropy"]["layers.0"], entropy(OPAQUE_WEIGHTS[0]))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"sliding_window": 4}, "sliding_window"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"source": inputs(length=20)}, "unknown alignment"),
    ],
    ids=["window", "bias", "lengths"],
)
def test_what_an_unknown_implementation_does_is_not_guessed(monkeypatch, given, reason):
    monkeypatch.setitem(TABLE, "mine", opaque_attention if "source" not in given else opaque_cross)
    with torch.no_grad():
        _, records = watched(Toy("mine", layers=1), inputs(), options={"on_error": "warn"}, **given)
    assert reason in records["layers.0"].reason


def opaque_cross(module, query, key, value, attention_mask, **kwargs):
    return opaque(query, key, value, None, False), None


def flex_stand_in(kernel):
    def flex(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        group = query.shape[1] // key.shape[1]
        logits = scaling * query @ key.repeat_interleave(group, 1).transpose(-1, -2)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if isinstance(attention_mask, torch.Tensor):
            logits = logits + attention_mask[..., : key.shape[2]]
        else:
            index = torch.meshgrid(*(torch.arange(size) for size in logits.shape), indexing="ij")
            logits = logits.masked_fill(~attention_mask.mask_mod(*index), float("-inf"))
        if s_aux is not None:
            logits = torch.cat([logits, s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        weights = logits.softmax(-1)[..., : key.shape[2]]
        kernel.weights.append(weights.detach())
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    return flex


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.linspace(0, 3, HEADS)}], ids=str)
@pytest.mark.parametrize("kind", ["block", "float"])
def test_flex_attention(monkeypatch, kind, options):
    from torch.nn.attention.flex_attention import create_block_mask

    made = Kernel()
    monkeypatch.setitem(TABLE, "flex_attention", flex_stand_in(made))
    if kind == "block":

        def visible(b, h, i, j):
            return (j <= i) & ((i + j + b) % 3 != 0) | (i == j)

        mask = create_block_mask(visible, 2, None, 12, 12, "cpu")
    else:
        mask = torch.randn(2, 1, 12, 12)
    records = assert_measured(Toy("flex_attention", **options), made, inputs(), mask)
    assert records["layers.0"].route == "flex_attention"


# -- nothing is left behind ----------------------------------------------------------------------------------


def replaced():
    return [name for name, function in TABLE.items() if isinstance(function, Replacement)]


@pytest.mark.parametrize("order", ["first", "last"])
def test_two_monitors_unwind_in_any_order(kernel, order):
    before = dict(TABLE)
    model = Toy()
    a, b = (attnmon.watch(model, **EVERYTHING) for _ in range(2))
    for _ in range(3):  # what was made once is used again
        a.begin_step()
        b.begin_step()
        model(inputs())
        for monitor in (a, b) if order == "first" else (b, a):
            monitor.end_step()
        assert dict(TABLE) == before
    for monitor in (a, b):
        assert [record.calls for record in monitor.coverage()] == [3, 3]
        monitor.close()


def test_a_monitor_that_pauses_beneath_another_counts_once(kernel):
    before = dict(TABLE)
    model = Toy()
    a, b = (attnmon.watch(model, **EVERYTHING) for _ in range(2))
    a.begin_step()
    b.begin_step()
    a.pause()
    model(inputs())
    a.resume()
    model(inputs())
    b.end_step()
    model(inputs())
    a.end_step()
    assert dict(TABLE) == before
    assert [record.calls for record in a.coverage()] == [2, 2]
    assert [record.calls for record in b.coverage()] == [2, 2]


def test_an_implementation_registered_meanwhile_stays(kernel, monkeypatch):
    monkeypatch.setitem(TABLE, "flash_attention_2", kernel.registered)
    with attnmon.watch(Toy(), **EVERYTHING) as monitor:
        monitor.begin_step()
        TABLE["flash_attention_2"] = over_sdpa
        monitor.end_step()
    assert TABLE["flash_attention_2"] is over_sdpa


def test_after_an_error_in_the_model(kernel):
    before = dict(TABLE)
    monitor = attnmon.watch(Toy(), **EVERYTHING)
    with pytest.raises(RuntimeError, match="mat1"), monitor.step():
        Toy()(torch.zeros(1, 4, 3))
    assert dict(TABLE) == before


def test_a_local_registry_of_a_model_file(kernel, monkeypatch):
    local = type(REGISTRY)()
    local["flash_attention_2"] = kernel.registered
    monkeypatch.setattr(sys.modules[__name__], "ALL_ATTENTION_FUNCTIONS", local, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "REGISTRY", local)
    with torch.no_grad():
        _, records = watched(Toy(), inputs())
    assert records["layers.0"].calls == 1
    assert records["layers.0"].route == "flash_attention_2"
    assert local["flash_attention_2"] == kernel.registered


def test_a_registry_that_is_a_dictionary(kernel, monkeypatch):
    table = {"flash_attention_2": kernel.registered, "sdpa": over_sdpa}
    monkeypatch.setattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", table)
    monkeypatch.setattr(sys.modules[__name__], "REGISTRY", table)
    assert_measured(Toy(), kernel, inputs())
    assert table == {"flash_attention_2": kernel.registered, "sdpa": over_sdpa}


def test_the_model_is_not_kept_alive(kernel):
    model = Toy()
    monitor = attnmon.watch(model, **EVERYTHING)
    with monitor.step():
        model(inputs())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    monitor.close()


def test_a_replacement_is_copied_and_saved_as_the_function(kernel):
    monitor = attnmon.watch(Toy(), **EVERYTHING)
    TABLE["mine"] = over_sdpa
    try:
        with monitor.step():
            there = TABLE["mine"]
            assert isinstance(there, Replacement)
            assert copy.deepcopy(there) is over_sdpa
            assert copy.copy(there) is over_sdpa
            assert pickle.loads(pickle.dumps(there)) is over_sdpa
    finally:
        del TABLE["mine"]
    assert not replaced()


@pytest.mark.slow
def test_transformers_is_never_imported():
    code = (
        "import torch, attnmon, sys\n"
        "class Attention(torch.nn.Module):\n"
        "    def forward(self, x): return torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "m = torch.nn.Sequential(Attention())\n"
        "w = attnmon.watch(m)\n"
        "with w.step(): m(torch.randn(1, 2, 4, 8))\n"
        "assert w.coverage()[0].status == 'captured'\n"
        "assert 'transformers' not in sys.modules and 'flash_attn' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- compiled ------------------------------------------------------------------------------------------------


@torch.library.custom_op("attnmon_tests::keep", mutates_args=("order",))
def keep(order: torch.Tensor, weights: torch.Tensor) -> None:
    OPAQUE_WEIGHTS.append(weights)


@keep.register_fake
def _(order, weights):
    return None


def traceable(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, **kwargs):
    group = query.shape[1] // key.shape[1]
    logits = scaling * query @ key.repeat_interleave(group, 1).transpose(-1, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ahead = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    visible = (ahead <= 0) & (ahead > -(sliding_window or 1000))
    visible = visible[None, None]
    if attention_mask is not None:
        visible = visible & (attention_mask != 0)[:, None, None, :]
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    keep(module.order, weights.detach())
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"softcap": 2.0, "sliding_window": 5}], ids=str
)
@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_in_one_graph(monkeypatch, options, padded):
    torch._dynamo.reset()
    monkeypatch.setitem(TABLE, "flash_attention_2", traceable)
    model, mask = Toy(**options), None
    for layer in model.layers:
        layer.order = torch.zeros(1)
    if padded:
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 8:] = 0
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    plain = compiled(inputs(), mask)
    monitor = attnmon.watch(compiled, **EVERYTHING)
    for _ in range(3):
        OPAQUE_WEIGHTS.clear()
        with monitor.step():
            assert torch.equal(compiled(inputs(), mask), plain)
        snapshot = monitor.flush()
        for index, weights in enumerate(OPAQUE_WEIGHTS):
            assert_heads(snapshot["entropy"][f"layers.{index}"], entropy(weights, mask))
    records = monitor.coverage()
    assert [record.calls for record in records] == [3, 3], [record.reason for record in records]
    assert {record.route for record in records} == {"flash_attention_2"}
    compiled(inputs(), mask)
    assert len(graphs) == 2
    monitor.close()
    assert not replaced()


def test_compiled_and_refused(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setitem(TABLE, "flash_attention_2", traceable)
    model = Toy()
    for layer in model.layers:
        layer.order = torch.zeros(1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    _, records = watched(compiled, inputs(), options={"on_error": "warn"}, position_bias=torch.zeros(1))
    assert "position_bias" in records["layers.0"].reason


@pytest.mark.slow
def test_compiled_implementation_of_a_user(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setitem(TABLE, "seen", over_sdpa)
    monkeypatch.setitem(TABLE, "unseen", opaque_attention)
    for name, route in (("seen", "sdpa"), ("unseen", "unseen")):
        with torch.set_grad_enabled(name == "seen"):
            compiled = torch.compile(Toy(name), fullgraph=True, backend="aot_eager")
            _, records = watched(compiled, inputs())
        assert records["layers.0"].calls == 1, records["layers.0"].reason
        assert records["layers.0"].route == route
