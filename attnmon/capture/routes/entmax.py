"""Sparse normalizers in the place of softmax: the functions of the entmax package, in eager code.

They are no torch functions, and their modules (``Sparsemax``, ``Entmax15``, ``EntmaxBisect``) call them, so they are
replaced by ones that call them and hand the weights to whoever follows the module's arithmetic. The package is never
imported here: where nobody else did, there is nothing to replace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor

from attnmon.capture.observe import CallInterceptor, Normalized
from attnmon.capture.patching.function_patch import FunctionPatch

_PARAMETERS = {
    "sparsemax": ("X", "dim", "k"),
    "entmax15": ("X", "dim", "k"),
    "sparsemax_bisect": ("X", "dim", "n_iter", "ensure_sum_one"),
    "entmax_bisect": ("X", "alpha", "dim", "n_iter", "ensure_sum_one"),
    "normmax_bisect": ("X", "alpha", "dim", "n_iter"),
    "budget_bisect": ("X", "budget", "dim", "n_iter"),
}
_ALPHA = {"sparsemax": 2.0, "entmax15": 1.5, "sparsemax_bisect": 2.0}
_OTHER_FAMILIES = ("normmax_bisect", "budget_bisect")


class EntmaxPatch(FunctionPatch):
    """Replaces the normalizers wherever a module holds them.

    Args:
        interceptor: told of each call.
    """

    def __init__(self, interceptor: CallInterceptor) -> None:
        super().__init__()
        self._interceptor = interceptor

    def functions(self) -> list[tuple[str, Any]]:
        package = sys.modules.get("entmax")
        return [(name, getattr(package, name)) for name in _PARAMETERS if hasattr(package, name)]

    def make(self, name: str, current: Callable[..., Any], bottom: Any) -> Callable[..., Any]:
        interceptor = self._interceptor

        @wraps(current)
        def normalizer(*args: Any, **kwargs: Any) -> Any:
            return interceptor.intercept_normalizer(
                current, args, kwargs, lambda weights: describe_normalizer(name, bottom, args, kwargs, weights)
            )

        return normalizer


def describe_normalizer(
    name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], weights: Any
) -> Normalized:
    """One call of the function ``name`` of the entmax package and its result."""
    given = {**dict(zip(_PARAMETERS[name], args, strict=False)), **kwargs}
    source, trouble = given["X"], ""
    options = {"k": given["k"]} if given.get("k") is not None else {}
    alpha: float | Tensor = _ALPHA.get(name, 1.0)
    if name in _OTHER_FAMILIES:
        trouble = f"{name} makes weights whose Jacobian attnmon does not know"
    elif name == "entmax_bisect":
        by_head = _by_head(given.get("alpha", 1.5), source)
        if by_head is None:
            trouble = "entmax_bisect with an alpha that differs within a head"
        else:
            alpha = by_head

    def function(logits: Tensor, alpha: float | Tensor) -> Tensor:
        if name == "entmax_bisect":
            options["alpha"] = alpha
        result: Tensor = original(logits, dim=-1, **options)
        return result

    return Normalized(name, source, weights, given.get("dim", -1), alpha, function, trouble)


def _by_head(alpha: Any, source: Any) -> float | Tensor | None:
    """A number, or [H or 1], from an alpha that broadcasts to scores [B, H, Lq, 1]; None if it says more."""
    if not isinstance(alpha, Tensor):
        return float(alpha)
    given: Tensor = alpha.detach()
    if given.numel() == 1:
        return given.reshape(1)
    if source.dim() != 4 or given.dim() > 4:
        return None
    given = given[(None,) * (4 - given.dim())]
    repeated = [given.shape[axis] == 1 or given.stride(axis) == 0 for axis in (0, 2, 3)]
    return given[0, :, 0, 0] if all(repeated) else None
