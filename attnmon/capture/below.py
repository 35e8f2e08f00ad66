"""Our own tensor operations run below every mode, and on tensors that carry nothing of the user's.

A user's modes would act on operations of ours as on the model's: selective checkpointing caches them, a FLOP counter
counts them, ``make_fx`` traces them, ``torch.func`` differentiates them. ``below_modes`` takes all of it away for the
length of a block: function modes, dispatch modes, functorch levels, autograd (and with it saved-tensor hooks and
checkpointing), forward-mode derivatives, autocast and inference mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.utils._python_dispatch import _disable_current_modes

from attnmon.capture.mode_stack import no_modes
from attnmon.errors import UnsupportedAttention

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_functorch = torch._C._functorch
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu")


@contextmanager
def below_modes() -> Iterator[None]:
    """Nothing that is computed inside is seen by a mode, recorded by autograd, or cast by autocast."""
    with ExitStack() as stack:
        # taken off, not switched off: looking up an index under vmap needs a mode of its own
        stack.enter_context(no_modes())
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        stack.enter_context(_disable_current_modes())
        if _functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_set_fwd_grad_enabled(False))
        # by its switch: leaving torch.autocast could empty the cache of casts that the user's own block has
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)
                stack.callback(torch.set_autocast_enabled, device, True)
        yield


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts products on ``device`` to at the moment; None where it is off."""
    if device.type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or what ``torch.func.grad`` and its kin have wrapped.

    Raises:
        UnsupportedAttention: it has no numbers of its own here: a tensor of a dry run, of ``vmap``, of a subclass
            that does its own computing. The reason names which.
    """
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            raise UnsupportedAttention("a call inside torch.vmap, where one call stands for many")
        if _functorch.is_functionaltensor(tensor):
            raise UnsupportedAttention(DRY_RUN)
        tensor = _functorch.get_unwrapped(tensor)
    kind = type(tensor)
    if kind not in _PLAIN and getattr(kind, "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH:
        if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
            raise UnsupportedAttention(DRY_RUN)
        if kind.__name__ == "NestedTensor":
            raise UnsupportedAttention("a nested (jagged) tensor; pad the sequences or pack them with cu_seqlens")
        raise UnsupportedAttention(f"a tensor of type {kind.__name__}, which computes by rules of its own")
    if tensor.is_nested:
        raise UnsupportedAttention("a nested tensor; pad the sequences or pack them with cu_seqlens")
    if tensor.is_meta or torch._is_functional_tensor(tensor):
        raise UnsupportedAttention(DRY_RUN)
    return tensor


DRY_RUN = "a dry run (fake, functional or meta tensors), which has no numbers"
"""The one reason for a refusal that is no news: such a call belongs to no training step."""
