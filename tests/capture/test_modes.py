"""What attnmon computes is seen by no mode of the user's, and changes nothing that a mode does."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import attnmon
from attnmon.capture import deferred
from attnmon.capture.below import DRY_RUN, below_modes
from tests.capture.weights import EVERYTHING, SeenByDispatchMode, SeenByFunctionMode, assert_heads, calls
from tests.models import KINDS, Model, SdpaAttention, inputs

every_kind = pytest.mark.parametrize("kind", KINDS)


def watch(model, **options):
    return attnmon.watch(model, **{**EVERYTHING, **options})


def assert_same_heads(one, other):
    assert one.modules == other.modules
    for metric in ("entropy", "max_logit", "jacobian", "separability"):
        for path in one.modules:
            assert_heads(one[metric][path], torch.from_numpy(other[metric][path]), 1e-6, f"{metric} {path}")


@pytest.mark.parametrize("mode", [SeenByFunctionMode, SeenByDispatchMode])
@every_kind
def test_a_mode_inside_or_around_a_step_sees_what_it_sees_bare(kind, mode):
    model, x = Model(kind), inputs()

    def run():
        model.zero_grad()
        with mode() as seeing:
            model(x).sum().backward()
        return seeing.seen

    bare = run()
    with watch(model) as monitor:
        for _ in range(2):
            with monitor.step():
                assert run() == bare
        model.zero_grad()
        with mode() as around, monitor.step():
            model(x).sum().backward()
        assert around.seen == bare
        assert calls(monitor) == [3, 3]


@every_kind
def test_flops_are_counted_as_bare(kind):
    model = Model(kind)

    def flops():
        with FlopCounterMode(display=False) as counter:
            model(inputs())
        return counter.get_total_flops()

    bare = flops()
    with watch(model) as monitor, monitor.step():
        assert flops() == bare


@every_kind
def test_gradients_by_torch_func(kind):
    model, x = Model(kind), inputs()
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return functional_call(model, parameters, (x,)).square().sum()

    bare = grad(loss)(parameters)
    with watch(model) as monitor, watch(model) as plain:
        with monitor.step():
            seen = grad(loss)(parameters)
        with plain.step():
            model(x)
        assert all(torch.equal(seen[name], bare[name]) for name in bare)
        assert_same_heads(monitor.flush(), plain.flush())


@pytest.mark.parametrize("kind", ["eager", "einsum", "mha"])  # the fused kernel has no forward derivative
def test_forward_derivatives(kind):
    model, x = Model(kind), inputs()
    bare = jvp(model, (x,), (torch.ones_like(x),))
    with watch(model) as monitor, monitor.step():
        seen = jvp(model, (x,), (torch.ones_like(x),))
    assert all(torch.equal(left, right) for left, right in zip(seen, bare, strict=True))
    assert calls(monitor) == [1, 1]


@pytest.mark.filterwarnings("ignore::attnmon.AttnmonWarning")
@every_kind
def test_vmap_is_refused_by_its_name(kind):
    model, batches = Model(kind), torch.stack([inputs(seed=1), inputs(seed=2)])
    bare = torch.vmap(model)(batches)
    with watch(model) as monitor, monitor.step():
        assert torch.equal(torch.vmap(model)(batches), bare)
    assert all("torch.vmap" in record.reason for record in monitor.coverage())


@every_kind
def test_a_dry_run_counts_for_nothing_and_leaves_nothing_behind(kind, recwarn):
    model, x = Model(kind), inputs()
    with watch(model) as monitor:
        with monitor.step():
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                model(mode.from_tensor(x))
            model(x).sum().backward()
        with watch(model) as plain, plain.step():
            model(x)
        assert_same_heads(monitor.flush(), plain.flush())
        assert [record.refused for record in monitor.coverage()] == [{DRY_RUN: 1}] * 2
    query = torch.randn(1, 2, 4, 4)
    assert torch.isfinite(attnmon.attention_stats(query, query, query)["entropy"]).all()
    assert not [warning for warning in recwarn if issubclass(warning.category, attnmon.AttnmonWarning)]


@pytest.mark.filterwarnings("ignore:attnmon. a measured step captured no attention call")
@pytest.mark.parametrize("tracing", ["real", "fake", pytest.param("symbolic", marks=pytest.mark.slow)])
@every_kind
def test_a_trace_holds_the_model_alone(kind, tracing):
    model = Model(kind)

    def traced():
        return make_fx(lambda x: model(x), tracing_mode=tracing, _allow_non_fake_inputs=True)(inputs()).code

    bare = traced()
    with watch(model) as monitor, monitor.step():
        assert traced() == bare


@every_kind
def test_saved_tensor_hooks_are_called_as_often_as_bare(kind):
    model, packed = Model(kind), []

    def run():
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
            model(inputs().requires_grad_()).sum().backward()
        return len(packed)

    bare = run()
    with watch(model) as monitor, monitor.step():
        assert run() == bare


def test_below_modes_nothing_of_the_user_is_on():
    with (
        SeenByFunctionMode() as functions,
        SeenByDispatchMode() as operators,
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        seen = len(functions.seen), len(operators.seen)
        with below_modes():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert not torch.is_grad_enabled()
        assert (len(functions.seen), len(operators.seen)) == seen
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert (product.dtype, product.is_inference()) == (torch.float32, False)


# -- what waits for the end of the forward -----------------------------------------------------------------------


class ChangesKeys(SdpaAttention):
    """Overwrites the keys once they have been used, as a cache that is written in place does."""

    def attend(self, q, k, v):
        out = super().attend(q.detach(), k.detach(), v)
        k.detach().mul_(3.0)
        return out


@pytest.mark.filterwarnings("ignore::attnmon.AttnmonWarning")
def test_a_call_whose_tensors_change_is_refused_and_the_next_ones_are_measured_at_once():
    model = nn.Sequential(ChangesKeys())
    twin = SdpaAttention()
    twin.load_state_dict(model[0].state_dict())
    with watch(model) as monitor, watch(nn.Sequential(twin)) as plain:
        for step in range(3):
            x = inputs(seed=step)
            with monitor.step():
                model(x)
            with plain.step():
                twin(x)
        (record,) = monitor.coverage()
        assert (record.calls, record.refused) == (2, {deferred.CHANGED: 1})
        one, other = monitor.flush(), plain.flush()
        assert_heads(one["entropy"]["0"], torch.from_numpy(other["entropy"]["0"]), 1e-6)


def test_weights_that_are_freed_before_the_forward_ends_are_noticed():
    """As FSDP frees the gathered weights of a layer after the layer's own forward."""

    class Freed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            out = self.attention(x, x, x)[0].detach()
            storage = self.attention.in_proj_weight.untyped_storage()
            kept = self.attention.in_proj_weight.detach().clone()
            size = storage.nbytes()
            storage.resize_(0)
            self.give_back = lambda: (storage.resize_(size), self.attention.in_proj_weight.data.copy_(kept))
            return out

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Freed()

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    monitor = attnmon.watch(model, rules=())
    for step in range(2):
        with monitor.step():
            if step:
                model(inputs())
            else:
                with pytest.warns(attnmon.AttnmonWarning, match="changed in place, or freed"):
                    model(inputs())
        model.inner.give_back()
    (record,) = monitor.coverage()
    assert (record.calls, record.refused) == (1, {deferred.CHANGED: 1})


def test_what_is_held_is_bounded(monkeypatch):
    """Under checkpointing nothing else keeps queries and keys: beyond a bound they are measured in the forward."""
    waiting = []
    real = deferred.DeferredCalls.add

    def add(self, *args):
        real(self, *args)
        waiting.append(len(self._deferred))

    monkeypatch.setattr(deferred.DeferredCalls, "add", add)
    model = Model("sdpa", layers=6)
    one_call = 3 * inputs().nbytes
    for bound, expected in ((1 << 28, [1, 2, 3, 4, 5, 6]), (2 * one_call, [1, 2, 0, 1, 2, 0]), (0, [0] * 6)):
        monkeypatch.setattr(deferred, "HELD_BYTES", bound)
        waiting.clear()
        with watch(model) as monitor, monitor.step():
            model(inputs()).sum().backward()
        assert waiting == expected
        assert calls(monitor) == [1] * 6


def test_nothing_is_held_after_a_step():
    model = Model("sdpa")
    with watch(model) as monitor:
        with monitor.step():
            model(inputs()).sum().backward()
        assert not monitor._recorder._deferred._deferred
        model.layers[1].register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError), monitor.step():
            model(inputs())
        assert not monitor._recorder._deferred._deferred
