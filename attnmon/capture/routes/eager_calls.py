"""Calls of eager attention: a softmax whose rows are sampled at once and whose values come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from attnmon.capture.below import below_modes, plain
from attnmon.capture.coverage import Site
from attnmon.capture.observe import Observer
from attnmon.capture.routes.eager_tracker import SoftmaxSeen
from attnmon.capture.routes.head_axes import ModuleInputs, count_heads, values_with_heads, with_heads
from attnmon.errors import UnsupportedAttention
from attnmon.types import AttentionCall


class EagerCalls:
    """What an eager tracker tells of a module's softmax."""

    def __init__(self, site: Site, observer: Observer, inputs: ModuleInputs) -> None:
        self._site, self._observer, self._inputs = site, observer, inputs
        self._route = ""

    def softmax(self, seen: SoftmaxSeen) -> Any:
        """Sample it; of a module that does not look like attention, tell of a fault only if values follow."""
        *leading, queries, keys = seen.logits.shape
        try:
            heads = count_heads(tuple(leading), queries, self._site.heads_hint, self._inputs)
            seen = replace(seen, logits=plain(seen.logits), sinks=None if seen.sinks is None else plain(seen.sinks))
        except UnsupportedAttention as error:
            return error
        with below_modes():
            return self.sample(seen, heads, self._inputs.is_cross(queries, keys))

    def sample(self, seen: SoftmaxSeen, heads: int, is_cross: bool) -> Any:
        """Take the sampled rows; None if there is nothing to wait for."""
        if self._site.excluded:
            return None
        try:
            call = AttentionCall(
                query=None,
                key=None,
                value=None,
                scale=seen.scale,
                head_dim=seen.head_dim,
                logits=with_heads(seen.logits.detach(), heads),
                sinks=None if seen.sinks is None else seen.sinks.detach(),
                is_cross=is_cross or self._site.kind == "cross",
            )
            self._route, made = "eager", seen.normalized
            if made is not None:
                self._route, weights = made.name, with_heads(plain(made.weights).detach(), heads)
                call = replace(call, weights=weights, normalizer=made.function, alpha=made.alpha)
            return (self._observer.sample(self._site, call), call.num_sequences, heads, call.is_cross)
        except Exception as error:
            return error

    def values(self, token: Any, values: Callable[[], Tensor | None], *, used: bool) -> None:
        if not used and not self._site.expected:
            return  # a softmax whose result weighs nothing: a classifier's, a router's
        try:
            if isinstance(token, Exception):
                raise token
            with below_modes():
                found = values()
                self.complete(token, None if found is None else plain(found))
        except Exception as error:
            self._observer.fault(self._site, error)

    def complete(self, token: Any, values: Tensor | None) -> None:
        """Have a sampled softmax measured, with its values if they are known."""
        try:
            if isinstance(token, Exception):
                raise token
            sampled, batch, heads, is_cross = token
            value = None if values is None else values_with_heads(values.detach(), batch, heads)
            if is_cross and not self._site.calls:
                self._site.kind = "cross"
            self._observer.complete(self._site, sampled, value)
            self._site.route = self._route
        except Exception as error:
            self._observer.fault(self._site, error)

    def refused(self, reason: str, tensor: Tensor) -> None:
        if self._site.expected and not self._site.excluded:
            self._observer.fault(self._site, UnsupportedAttention(reason))
