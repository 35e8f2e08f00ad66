"""torch's own attention functions, replaced wherever a module holds them.

Where compiled code breaks into several graphs, the function mode is kept inside attention modules: such code can
fail in the compiler itself while any mode is active. Replaced functions do
what the mode would: a compiled graph is valid for the functions it was traced with, so the ones here have it traced
anew, and unmeasured steps go on with the graph they had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from attnmon.capture.protocols import Caller
from attnmon.capture.rebind import Rebinding
from attnmon.capture.torch_calls import describe_mha, describe_sdpa


class FunctionalPatch(Rebinding):
    """Replaces ``scaled_dot_product_attention``, ``multi_head_attention_forward`` and ``softmax``.

    The softmax is followed by the mode; its stand-ins are there only so that graphs with eager attention are traced
    anew, too.
    """

    def __init__(self, recorder: Caller) -> None:
        self._recorder = recorder
        super().__init__(_present, self._make_stand_in, _may_change)

    def _make_stand_in(self, key: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        if key == "F.softmax":
            return _softmax_of_functional(original)
        if key == "torch.softmax":
            return _softmax_of_torch(original)
        if key == "sdpa":
            return self._stand_in(key, original, lambda args, kwargs: describe_sdpa(args, kwargs))
        return self._stand_in(key, original, lambda args, kwargs: describe_mha(args, kwargs, recorder.choose))

    def _stand_in(
        self, route: str, original: Callable[..., Any], describe: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[..., Any]:
        recorder = self._recorder

        # not under the original's name and module: the compiler would take it for a function of torch
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return recorder.call_through(route, original, args, kwargs, describe)

        return stand_in


def _present() -> Mapping[str, Any]:
    return {
        "sdpa": F.scaled_dot_product_attention,
        "multi_head_attention_forward": F.multi_head_attention_forward,
        "F.softmax": F.softmax,
        "torch.softmax": torch.softmax,
    }


# The two do what the originals do. Those would tell the mode of the function that their module holds now, or, called
# from here while a graph is traced, of nothing.


def _softmax_of_functional(original: Callable[..., Any]) -> Callable[..., Any]:
    def softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if dim is None or type(input) is not torch.Tensor:
            return original(input, dim, _stacklevel, dtype)
        return input.softmax(dim) if dtype is None else input.softmax(dim, dtype=dtype)

    return softmax


def _softmax_of_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    def softmax(input: Any, dim: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not torch.Tensor or "out" in kwargs:
            return original(input, dim, *args, **kwargs)
        return input.softmax(dim, *args, **kwargs)

    return softmax


def _may_change(module: str) -> bool:
    """Of torch itself only what models call: the compiler looks its functions up in the other modules."""
    return module in ("torch", F.__name__) or not module.startswith("torch.")
