"""What the parts of capture ask of one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from attnmon.call import CallArgs, make_call
from attnmon.capture.coverage import Site
from attnmon.types import AttentionCall


@dataclass(frozen=True, slots=True)
class Normalized:
    """What a normalizer other than softmax made of some scores.

    Attributes:
        name: of the function; the call's route.
        source, weights: what it was given and what it returned, [..., Lq, Lk].
        dim: the axis it was asked to normalize.
        alpha: a number, or [H or 1] by head.
        function: (logits, alpha) -> weights over the last axis.
        trouble: why this cannot be measured; "" otherwise.
    """

    name: str
    source: Any
    weights: Any
    dim: Any
    alpha: float | Tensor
    function: Callable[[Tensor, float | Tensor], Tensor]
    trouble: str = ""


Describe = Callable[[tuple[Any, ...], Mapping[str, Any]], CallArgs]
"""(args, kwargs) of a call -> what it is made of."""


class Observer(Protocol):
    """Who is told of calls; it computes, and keeps nothing of a call."""

    def observe(self, site: Site, call: AttentionCall) -> None:
        """Measure a call now."""

    def sample_sequences(self, site: Site, batch: int) -> slice:
        """The sequences that would be sampled of a call, for routes that have to project them first."""

    def sample(self, site: Site, call: AttentionCall) -> Any:
        """Measure a call whose values will come later: take what is needed of its logits, return a token."""

    def complete(self, site: Site, token: Any, value: Tensor | None) -> None:
        """The values of a sampled call, or None."""

    def fault(self, site: Site, error: Exception) -> None:
        """A call could not be measured."""


class CallInterceptor(Protocol):
    """Whom replaced functions go through."""

    def intercept(
        self,
        route: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Describe,
        module: nn.Module | None = None,
        *,
        opaque: bool = True,
    ) -> Any:
        """Run a replaced function as it was, and note the call for ``describe`` to tell of.

        Torch calls inside the function are not reported: they are this call. The call belongs to ``module`` if it
        is watched, otherwise to the innermost watched module. If the function is not ``opaque``, torch calls inside
        are reported as anywhere else, and ``describe`` is asked only where none was seen.
        """

    def intercept_normalizer(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        describe: Callable[[Any], Normalized],
    ) -> Any:
        """Run a function that stands in softmax's place, and tell the innermost module's tracker what it made."""


class Patch(Protocol):
    """Functions that no torch-level mode sees, replaced during a measured step by ones that call them and tell."""

    def install(self) -> None:
        """Replace; every reference is as before after ``remove``."""

    def remove(self) -> None:
        """Put back."""


def observe_call(observer: Observer, site: Site, route: str, described: CallArgs, hidden: Tensor | None) -> None:
    """Have a call measured.

    Args:
        described: arguments of ``attnmon.call.make_call``.
        hidden: the hidden states [B, L, E] that entered its module, if they are wanted.
    """
    if hidden is not None and described["key"].shape[0] == hidden.shape[0]:
        described = {**described, "hidden": hidden if hidden.shape[1] == described["key"].shape[2] else None}
    call = make_call(**{**described, "is_cross": described.get("is_cross", False) or site.kind == "cross"})
    site.route = route
    if call.is_cross and not site.calls:
        site.kind = "cross"
    observer.observe(site, call)
