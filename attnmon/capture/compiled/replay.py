"""Calls that compiled graphs make whenever they run, told by the operators that were left in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmon.call import CallArgs
from attnmon.capture.below import below_modes
from attnmon.capture.coverage import Site
from attnmon.capture.frames import ActiveForwards, in_backward
from attnmon.capture.observe import Observer, observe_call
from attnmon.capture.routes.eager_calls import EagerCalls
from attnmon.capture.routes.eager_tracker import SoftmaxSeen
from attnmon.capture.routes.head_axes import ModuleInputs
from attnmon.capture.routes.torch_calls import MHA, describe_mha
from attnmon.errors import UnsupportedAttention
from attnmon.types import AttentionCall


class Replay:
    """Measures them while a recorder is active.

    Args:
        sites: by the index that the operators have.
        observer: told of each call.
        running: what runs now.
    """

    def __init__(self, sites: Sequence[Site], observer: Observer, running: ActiveForwards) -> None:
        self._sites, self._observer, self._running = sites, observer, running

    def call(self, index: int, route: str, described: CallArgs) -> None:
        """A compiled graph makes a call that was noted while it was traced."""
        if not self._running.active or in_backward():
            return
        site = self._sites[index]
        try:
            with below_modes():
                observe_call(self._observer, site, route, described, None)
        except Exception as error:
            self._observer.fault(site, error)

    def mha(
        self, index: int, given: dict[str, Any], is_cross: bool, autocast: torch.dtype | None, hidden: Tensor | None
    ) -> None:
        """A compiled graph calls ``multi_head_attention_forward``."""
        if not self._running.active or in_backward():
            return
        site = self._sites[index]
        try:
            with below_modes():
                described = describe_mha(
                    (), given, lambda batch: self._observer.sample_sequences(site, batch), autocast
                )
                described["is_cross"] = is_cross
                observe_call(self._observer, site, MHA.name, described, hidden)
        except Exception as error:
            self._observer.fault(site, error)

    def logits(self, index: int, seen: SoftmaxSeen, heads: int, is_cross: bool, value: Tensor | None) -> None:
        """A compiled graph runs a softmax of eager attention."""
        if not self._running.active or in_backward():
            return
        calls = EagerCalls(self._sites[index], self._observer, ModuleInputs())
        with below_modes():
            token = calls.sample(seen, heads, is_cross)
            if token is not None:
                calls.complete(token, value)

    def rows(
        self, index: int, route: str, logits: Tensor, positions: Tensor, value: Tensor, scale: float, head_dim: int
    ) -> None:
        """A compiled graph runs flex attention; index -1 is the innermost module that runs now."""
        if not self._running.active or in_backward() or (index < 0 and not self._running.stack):
            return
        site, observer = self._sites[index if index >= 0 else self._running.stack[-1].index], self._observer
        if site.excluded:
            return
        try:
            call = AttentionCall(
                query=None, key=None, value=None, scale=scale, head_dim=head_dim, logits=logits, positions=positions
            )
            with below_modes():
                observer.complete(site, observer.sample(site, call), value)
            site.route = route
        except Exception as error:
            observer.fault(site, error)

    def refusal(self, index: int, reason: str) -> None:
        """A compiled graph makes a call that is not measured."""
        if self._running.active and not in_backward():
            self._observer.fault(self._sites[index], UnsupportedAttention(reason))
