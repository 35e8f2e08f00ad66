"""What is left in a graph while it is traced: operators that tell of its calls whenever it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmon.call import CallArgs, normalize_window
from attnmon.capture.below import below_modes
from attnmon.capture.compiled import operators
from attnmon.capture.frames import ActiveForwards, ForwardFrame
from attnmon.capture.hooks import BeforeForward
from attnmon.capture.observe import Describe
from attnmon.capture.routes import flex
from attnmon.capture.routes.eager_tracker import SoftmaxSeen
from attnmon.capture.routes.head_axes import ModuleInputs, count_heads
from attnmon.capture.routes.torch_calls import SDPA, STATIC, describe_sdpa, mha_arguments
from attnmon.errors import UnsupportedAttention

_DEFAULTS = {"causal_offset": 0, "is_causal": False, "is_cross": False, "prescale": 1.0}
_SEQUENCES = 4
_ROWS = 64  # of flex attention: evenly spaced; the sampled ones are among them


class GraphCalls:
    """Leaves the operators of ``attnmon.capture.compiled.operators``.

    Nothing here may differ between modules that are alike, or each would be a graph of its own: which module it is,
    only the token of its hook says, a tensor.

    Args:
        running: whose ``trace_stack`` says which module is being traced.
        number: of the recorder.
    """

    def __init__(self, running: ActiveForwards, number: int) -> None:
        self._running = running
        # of functions that were compiled without their module: whichever runs when the graph does
        with below_modes():
            self.unknown = torch.tensor([number, -1], dtype=torch.int64, device="cpu")

    def report(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch call of the innermost module."""
        frame = self._running.trace_stack[-1]
        if func is F.multi_head_attention_forward:
            self._mha(frame, args, kwargs)
        elif func is F.scaled_dot_product_attention:
            self._sdpa(frame, args, kwargs)
        else:
            frame.tracker.saw(func, args, kwargs, result)

    def replaced(
        self, frame: ForwardFrame, route: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], describe: Describe
    ) -> None:
        """The operator for a replaced function, or for why its call is not measured."""
        if frame.hook.excluded:
            return
        try:
            described = frame.complete(describe(args, kwargs))
        except UnsupportedAttention as error:
            tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
            self.refusal(frame.hook, error.args[0], tensors[0].device)
            return
        self._call(frame, route, described)

    def _sdpa(self, frame: ForwardFrame, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if frame.hook.excluded:
            return
        described = describe_sdpa(args, kwargs)
        key = described["key"]
        if frame.hidden is not None and frame.hidden.shape[:2] == (key.shape[0], key.shape[2]):
            described["hidden"] = frame.hidden.detach()
        self._call(frame, SDPA.name, frame.complete(described))

    def _mha(self, frame: ForwardFrame, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if frame.hook.excluded:
            return
        given = mha_arguments(args, kwargs)
        query, key, inputs = given["query"], given["key"], frame.inputs
        if given.get("static_k") is not None or given.get("static_v") is not None:
            self.refusal(frame.hook, STATIC, query.device)
            return
        is_cross = query is not key or inputs.is_cross(query.shape[0], key.shape[0])
        is_separate = given.get("use_separate_proj_weight", False)
        device = query.device.type
        unused = ("in_proj_weight",) if is_separate else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        tensors = [None if name in unused else _detached(given.get(name)) for name in operators.MHA_TENSORS]
        frame.left += 1
        torch.ops.attnmon.observe_mha(
            operators.ORDER[query.device],
            frame.hook.token,
            *tensors,
            given["num_heads"],
            bool(given.get("add_zero_attn", False)),
            bool(given.get("is_causal", False)),
            query is key,
            is_cross and not inputs.is_self,
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            _detached(frame.hidden),
        )

    def _call(self, frame: ForwardFrame, route: str, described: CallArgs) -> None:
        left, right = normalize_window(described.get("window")) or (None, None)
        given = {**_DEFAULTS, **described, "window_left": left, "window_right": right}
        frame.left += 1
        order = operators.ORDER[described["query"].device]
        arguments = [_detached(given.get(name)) for name in operators.CALL_FIELDS]
        torch.ops.attnmon.observe(order, frame.hook.token, route, *arguments)

    def rows(self, args: tuple[Any, ...]) -> None:
        """The operator for flex attention; also in functions that were compiled without their module."""
        trace_stack = self._running.trace_stack
        if trace_stack and trace_stack[-1].hook.excluded:
            return
        token = trace_stack[-1].hook.token if trace_stack else self.unknown
        rows = flex.rows_in_graph(args, _SEQUENCES, _ROWS)
        order, head_dim = operators.ORDER[args[0].device], args[0].shape[3]
        if trace_stack:
            trace_stack[-1].left += 1
        torch.ops.attnmon.observe_rows(order, token, flex.ROUTE, *rows, head_dim)

    def logits(self, hook: BeforeForward, seen: SoftmaxSeen, heads: int, is_cross: bool, values: Tensor | None) -> None:
        """The operator for eager attention."""
        if hook.excluded:
            return
        self._count()
        torch.ops.attnmon.observe_logits(
            operators.ORDER[seen.logits.device],
            hook.token,
            seen.logits.detach(),
            _detached(values),
            _detached(seen.sinks),
            seen.scale,
            seen.head_dim,
            heads,
            is_cross,
        )

    def refusal(self, hook: BeforeForward, reason: str, device: torch.device) -> None:
        """The operator for a call that is not measured."""
        if hook.expected and not hook.excluded:
            self._count()
            torch.ops.attnmon.refuse(operators.ORDER[device], hook.token, reason)

    def _count(self) -> None:
        if self._running.trace_stack:
            self._running.trace_stack[-1].left += 1


class GraphSoftmax:
    """What an eager tracker tells while a graph is traced; the logits stay in it until the values are known."""

    def __init__(self, calls: GraphCalls, hook: BeforeForward, inputs: ModuleInputs) -> None:
        self._calls, self._hook, self._inputs = calls, hook, inputs

    def softmax(self, seen: SoftmaxSeen) -> Any:
        return seen

    def values(self, token: Any, values: Callable[[], Tensor | None], *, used: bool) -> None:
        if not used and not self._hook.expected:
            return
        *leading, queries, keys = token.logits.shape
        try:
            heads = count_heads(tuple(leading), queries, self._hook.heads_hint, self._inputs)
        except UnsupportedAttention as error:
            self._calls.refusal(self._hook, str(error), token.logits.device)
            return
        self._calls.logits(self._hook, token, heads, self._inputs.is_cross(queries, keys), values())

    def refused(self, reason: str, tensor: Tensor) -> None:
        self._calls.refusal(self._hook, reason, tensor.device)


def _detached(given: Any) -> Any:
    return given.detach() if isinstance(given, Tensor) else given
