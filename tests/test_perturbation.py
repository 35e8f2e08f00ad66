"""Training with the monitor is bit for bit the training without it, and the model is left as it was."""

import copy
import functools
import gc
import io
import pickle
import random
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as function_modes

import attnmon
from tests.perturbation import ATTENTION, LAYERS, POLICIES, WAYS, assert_same_bits, bare
from tests.perturbation import flash as flash_in_its_place
from tests.perturbation import train as train_small

transformers = pytest.importorskip("transformers")

STEPS, ACCUMULATE, BATCH, LENGTH, VOCABULARY = 3, 2, 3, 20, 61
PATHS = ("transformer.h.0.attn", "transformer.h.1.attn")
ALL_ROWS = {"rows": None, "sequences": None}
MODES = ("plain", "accumulate", "reentrant", "non_reentrant", "bf16")


def gpt2(attention="sdpa", dropout=0.1):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def batches(number, size=BATCH):
    return torch.randint(VOCABULARY, (number, size, LENGTH), generator=torch.Generator().manual_seed(5))


def seed():
    torch.manual_seed(11)
    np.random.seed(12)  # noqa: NPY002  numpy's global state is what must not change
    random.seed(13)


def random_states():
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]  # noqa: NPY002


@dataclass
class Outcome:
    """Everything that a run leaves behind."""

    losses: list[float]
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    random: list[Any] = field(default_factory=random_states)


def assert_same(one, other, where="run"):
    """Equal to the last bit, structure and all."""
    assert type(one) is type(other), where
    if isinstance(one, Outcome):
        for name in ("losses", "weights", "optimizer", "random"):
            assert_same(getattr(one, name), getattr(other, name), name)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


def fingerprint(model):
    """What a hook, an attribute or a patch left behind would change."""
    kinds = [name for name in vars(torch.nn.Module()) if "hook" in name]
    return {
        path: (
            list(vars(module)),
            {name: len(vars(module)[name]) for name in kinds if vars(module)[name] is not None},
            type(module),
            type(module).forward,
        )
        for path, module in model.named_modules()
    }


def assert_clean(model, before):
    assert fingerprint(model) == before
    assert function_modes() == []


def train(attention, mode, options=None, disturb=None):
    """A plain loop; without ``options`` the bare one. disturb: called once a step (to test the test)."""
    seed()
    model = gpt2(attention)
    before = fingerprint(model)
    if mode in ("reentrant", "non_reentrant"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
        model.enable_input_require_grads()
        before = fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micro_batches = ACCUMULATE if mode == "accumulate" else 1
    data, losses = iter(batches(STEPS * micro_batches)), []
    monitor = None if options is None else attnmon.watch(model, **options)
    for _ in range(STEPS):
        with monitor.step() if monitor else torch.enable_grad():
            for _ in range(micro_batches):
                tokens = next(data)
                with torch.autocast("cpu", torch.bfloat16, enabled=mode == "bf16"):
                    loss = model(input_ids=tokens, labels=tokens).loss
                (loss / micro_batches).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if disturb:
            disturb(model)
        if monitor:
            assert_clean(model, before)
    if monitor:
        assert [record.status for record in monitor.coverage()] == ["captured"] * 2
        assert [record.calls for record in monitor.coverage()] == [STEPS * micro_batches] * 2
        assert [record.route for record in monitor.coverage()] == [attention] * 2
        assert monitor.latest.modules == PATHS
        monitor.close()
        assert_clean(model, before)
    return Outcome(losses, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))


bare_run = functools.cache(train)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("options", [{}, pytest.param(ALL_ROWS, marks=pytest.mark.slow)], ids=["sampled", "all_rows"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_loop_is_bit_identical(attention, mode, options):
    assert_same(train(attention, mode, {"on_error": "raise", **options}), bare_run(attention, mode))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "options",
    [{"tokens": "hidden"}, {"tokens": "value_raw", "backend": "torch", "top_n": 2, "metrics": ["separability"]}],
    ids=["hidden", "value_raw"],
)
def test_other_options_are_bit_identical(attention, options):
    assert_same(train(attention, "plain", {"on_error": "raise", **options}), bare_run(attention, "plain"))


@pytest.mark.parametrize(
    "disturb",
    [
        lambda model: torch.rand(1),
        lambda model: np.random.random(),  # noqa: NPY002
        lambda model: random.random(),
        lambda model: model.transformer.h[0].attn.c_attn.bias.data[0].add_(1e-6),
        lambda model: model.register_buffer("stray", torch.zeros(1)),
    ],
    ids=["torch_random", "numpy_random", "python_random", "weight", "buffer"],
)
def test_the_comparison_notices(disturb):
    with pytest.raises(AssertionError):
        assert_same(train("sdpa", "plain", disturb=disturb), bare_run("sdpa", "plain"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_reducer_that_fails_leaves_training_bit_identical(attention, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no reduction today")

    expected = bare_run(attention, "plain")
    monkeypatch.setattr("attnmon.run.backend_choice.measure", broken)
    seed()
    model = gpt2(attention)
    before = fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    monitor = attnmon.watch(model)

    def fit():
        for tokens in batches(STEPS):
            with monitor.step():
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(attnmon.AttnmonWarning, match="no reduction today"):
        fit()
    assert_same(Outcome(losses, model.state_dict(), optimizer.state_dict()), expected)
    assert_clean(model, before)


def lightning_run(package, attention, precision, accumulate, checkpointing, callbacks, root):
    lightning = pytest.importorskip(package)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt2(attention)
            if checkpointing is not None:
                self.model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"}
                )
                self.model.enable_input_require_grads()
            self.losses = []

        def training_step(self, tokens, batch_idx):
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    seed()
    module = Module()
    before = fingerprint(module)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, precision=precision, accumulate_grad_batches=accumulate,
        callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(5), batch_size=None))
    # not a submodule, but what a Trainer sets on a module is there in both runs
    assert {path: found[1] for path, found in fingerprint(module).items()} == {
        path: found[1] for path, found in before.items()
    }
    assert function_modes() == []
    return Outcome(module.losses, dict(module.state_dict()), trainer.optimizers[0].state_dict())


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*LeafSpec",
    "ignore:.gradient_checkpointing_enable. is",
    "ignore:.*log_every_n_steps",
)
@pytest.mark.parametrize(
    ("package", "attention", "precision", "accumulate", "checkpointing"),
    [
        ("pytorch_lightning", "sdpa", "32-true", 1, None),
        ("lightning.pytorch", "eager", "32-true", 2, None),
        ("lightning.pytorch", "sdpa", "bf16-mixed", 2, None),
        ("pytorch_lightning", "eager", "bf16-mixed", 1, "non_reentrant"),
        ("pytorch_lightning", "sdpa", "32-true", 2, "reentrant"),
    ],
)
def test_lightning_is_bit_identical(package, attention, precision, accumulate, checkpointing, tmp_path):
    module = pytest.importorskip("attnmon.lightning")
    callback = module.AttentionMonitor(on_error="raise")
    arguments = (package, attention, precision, accumulate, checkpointing)
    monitored = lightning_run(*arguments, [callback], tmp_path)
    assert [record.calls for record in callback.coverage()] == [5, 5]
    assert_same(monitored, lightning_run(*arguments, [], tmp_path))


# -- every way of calling attention in every way of training ---------------------------------------------------

QUICK = [
    ("sdpa", "save matmuls", 1), ("sdpa", "compiled per block", 2), ("sdpa", "frozen parts", 1),
    ("eager", "checkpoint", 2), ("eager", "save none", 1), ("mha", "save all", 1),
    ("mha", "plain", 2), ("mha", "gradient penalty", 1), ("flex", "autocast", 2),
    ("registry", "checkpoint, reentrant", 1),
]  # fmt: skip
WHOLE = [(kind, way, every) for kind in ATTENTION for way in WAYS for every in (1, 2)]
ROUTE = {"mha": "multi_head_attention_forward", "flex": "flex_attention", "registry": "flash_attention_2"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:.*nested tensor")
@pytest.mark.parametrize(
    ("kind", "way", "every"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in WHOLE],
)
def test_bits_are_those_of_the_bare_twin(kind, way, every, monkeypatch):
    """Losses, gradients, weights and random state; first, second and later steps, measured or not."""
    registry = type(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setitem(registry, "flash_attention_2", flash_in_its_place)
    expected = bare(kind, way)
    seen, monitor = train_small(kind, way, every_n_steps=every, on_error="raise", rules=())
    assert_same_bits(seen, expected)
    # one set of graphs for measured steps beside the bare one; with every step measured, that one alone, unless it is
    # run again in the backward (flex attention compiles itself)
    assert seen.graphs <= (2 if every > 1 or "checkpoint" in way or way in POLICIES else 1) * expected.graphs
    records = [record for record in monitor.coverage() if record.path.startswith("blocks")]
    assert [(record.status, record.calls) for record in records] == [("captured", 4 // every)] * LAYERS
    assert {record.route for record in records} == {ROUTE.get(kind, kind)}
    assert function_modes() == []


def test_every_quick_case_is_one_of_the_whole():
    assert set(QUICK) <= set(WHOLE)


# -- the model as a plain module ------------------------------------------------------------------------------


def one_step(monitor, model, tokens):
    with monitor.step():
        model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_between_steps_the_model_copies_pickles_and_saves(attention):
    model, tokens = gpt2(attention, dropout=0.0), batches(1)[0]
    with attnmon.watch(model) as monitor:
        one_step(monitor, model, tokens)
        expected = model(input_ids=tokens).logits
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
        calls = [record.calls for record in monitor.coverage()]
        for twin in twins:
            assert fingerprint(twin) == fingerprint(model)
            assert torch.equal(twin(input_ids=tokens).logits, expected)
        with monitor.step():  # a copy is not what is watched
            for twin in twins:
                twin(input_ids=tokens)
            model(input_ids=tokens)
        assert [record.calls for record in monitor.coverage()] == [count + 1 for count in calls]
        assert len(monitor.latest.modules) == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_is_freed_while_its_monitor_lives(attention):
    model = gpt2(attention)
    monitor = attnmon.watch(model)
    one_step(monitor, model, batches(1)[0])
    gone = [weakref.ref(model), weakref.ref(model.transformer.h[0].attn), weakref.ref(model.transformer.wte.weight)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert len(monitor.latest.modules) == 2
    with pytest.warns(attnmon.AttnmonWarning, match="captured no attention call"), monitor.step():
        pass
    monitor.close()


def test_a_dropped_monitor_leaves_the_model_clean():
    model = gpt2()
    before = fingerprint(model)
    monitor = attnmon.watch(model)
    one_step(monitor, model, batches(1)[0])
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
    assert_clean(model, before)


def test_evaluation_inside_a_step_and_modes_of_the_user_are_left_alone():
    model, tokens = gpt2(dropout=0.0), batches(1)[0]
    expected = model.eval()(input_ids=tokens).logits
    with attnmon.watch(model, on_error="raise") as monitor:
        for context in (torch.no_grad, torch.inference_mode):
            with monitor.step(), context():
                assert torch.equal(model(input_ids=tokens).logits, expected)
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
        with monitor.step():  # both kinds of calls merge into one step
            with torch.inference_mode():
                model(input_ids=tokens)
            model(input_ids=tokens)
    assert monitor.latest.step == 2
