"""One forward of a model on one sequence -> its attention calls, through attnmon's own capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnmon.capture import Recorder
from attnmon.capture.coverage import Site
from attnmon.errors import AttnmonError, UnsupportedAttention
from attnmon.paper.options import PaperOptions
from attnmon.stats.plan import logit_threshold
from attnmon.stats.visibility import visible_keys
from attnmon.types import AttentionCall

TellCall = Callable[[int, str, AttentionCall], None]
"""Takes the number of the call in the forward, the path of its module, and the call."""

_PROBE = 16  # tokens of the forward that tells whether a model can be measured at all


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """One head on one sequence of L tokens.

    Attributes:
        layer: number of the attention call in the forward, from 0.
        module: path of its module.
        head: query head.
        logits: float32 [L, L], z as the softmax sees it: scale, softcap and bias in it; garbage at hidden keys.
        visible: bool [L, L]; causal: nothing above the diagonal.
        tokens: float32 [L, E], x.
        tau: temperature 1 / (scale sqrt(D)).
        sink: logit of a learned sink, or None.

    Source: ours (definitions, section 1).
    """

    layer: int
    module: str
    head: int
    logits: Tensor
    visible: Tensor
    tokens: Tensor
    tau: float
    sink: float | None


@torch.no_grad()
def attention_calls(model: nn.Module, tokens: Tensor, tell: TellCall, *, with_hidden: bool = False) -> None:
    """Run ``model`` on one sequence and tell of each attention call as it happens.

    Args:
        model: a causal model of transformers, in evaluation mode.
        tokens: int64 [L].
        tell: gets each call; nothing of it may be kept, except what ``tell`` copies.
        with_hidden: calls come with the hidden states that entered their module.

    Raises:
        AttnmonError: the model has no attention, or a call that cannot be measured; whatever ``tell`` raises.

    Source: ours.
    """
    observer = _Observer(tell)
    recorder = Recorder(model, observer, with_hidden=with_hidden, at_once=True)
    device = next(model.parameters()).device
    recorder.start()
    try:
        model(input_ids=tokens[None].to(device), use_cache=False)
    finally:
        recorder.stop()
        recorder.close()
    if observer.error is not None:
        raise observer.error
    if not observer.calls:
        raise AttnmonError(
            f"{type(model).__name__} made no attention call that attnmon sees; it needs attention with a softmax"
        )


def check_causal(model: nn.Module, tokens: Tensor, name: str, options: PaperOptions) -> int:
    """Run a short forward, refuse what the experiments are not defined for, and count the heads.

    Args:
        model: in evaluation mode.
        tokens: int64 [L]; the first few are read.
        name: what messages call the model.
        options: which experiments, and which vectors.

    Returns:
        The number of heads of all attention calls of a forward together.

    Raises:
        AttnmonError: some token attends to a later one, a number is not finite, or an experiment cannot be done on
            what the model does.

    Source: paper, whose GPT-2 has causal attention without sinks; the check is ours.
    """
    heads = 0
    no_sinks = sorted({"sensitivity", "normalizers"} & set(options.experiments))

    def look(number: int, module: str, call: AttentionCall) -> None:
        nonlocal heads
        heads += call.num_heads
        for head in heads_of(number, module, call, options.tokens):
            check_finite(head)
            if bool(head.visible.triu(1).any()):
                raise AttnmonError(
                    f"{name} is no causal model: in {module or 'the model'} tokens attend to later ones; "
                    "the experiments are defined for causal attention"
                )
            if head.sink is not None and no_sinks:
                raise AttnmonError(
                    f"{name} has learned attention sinks, for which {' and '.join(no_sinks)} are not defined here; "
                    "name the other experiments with --experiment"
                )

    attention_calls(model, tokens[:_PROBE], look, with_hidden=options.tokens == "hidden")
    return heads


def check_finite(head: Head) -> None:
    """Refuse a head with a visible logit, or a vector, that is not finite.

    Args:
        head: its rows.

    Raises:
        AttnmonError: one is not finite; the message names the module and the head.

    Source: ours.
    """
    if not (bool((head.logits.isfinite() | ~head.visible).all()) and bool(head.tokens.isfinite().all())):
        raise AttnmonError(
            f"{head.module or 'the model'}, head {head.head}: a logit or a vector is not finite; "
            "the experiments need a model whose forward is sound"
        )


def heads_of(number: int, module: str, call: AttentionCall, kind: str) -> Iterator[Head]:
    """Split a call into its heads, one at a time, on its first sequence.

    Args:
        number: of the call in the forward, from 0.
        module: path of its module.
        call: the call, as told by ``attention_calls``.
        kind: what x is: "value" (unit length), "value_raw" or "hidden" (unit length).

    Returns:
        An iterator over the heads.

    Raises:
        AttnmonError: the call is no self-attention with softmax, or lacks what x is made of.

    Source: the paper does not name the layer of x; value vectors are those of the authors' later work.
    """
    where = module or "the model"
    if call.is_cross or call.weights is not None or call.score_mod is not None or call.positions is not None:
        raise UnsupportedAttention(f"{where}: only self-attention with a softmax is measured")
    source = call.hidden if kind == "hidden" else call.value
    if source is None:
        raise UnsupportedAttention(f"{where}: its {'hidden states' if kind == 'hidden' else 'values'} cannot be seen")
    vectors = source[0][None].float() if kind == "hidden" else source[0].float()  # [groups, L, E]
    if kind != "value_raw":
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    group = call.num_heads // vectors.shape[0]
    rows = torch.arange(vectors.shape[1], device=vectors.device)[None]
    for head in range(call.num_heads):
        logits, visible = _rows(call, head, rows)
        if logits.shape[0] != logits.shape[1]:
            raise UnsupportedAttention(f"{where}: queries and keys are not those of one sequence")
        sink = None if call.sinks is None else float(call.sinks[head])
        yield Head(number, module, head, logits, visible, vectors[head // group], call.tau, sink)


def _rows(call: AttentionCall, head: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute logits and visibility, [L, L] each, of one head of the first sequence."""
    if call.logits is not None:
        logits = call.logits[0, head]
        return logits.float(), ~(logits <= logit_threshold(logits.dtype))
    assert call.query is not None
    assert call.key is not None
    key = call.key[0, head // (call.num_heads // call.key.shape[1])].float()
    logits = (call.query[0, head].float() * call.scale) @ key.T
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    one = slice(head, head + 1)
    visible, bias = visible_keys(call, slice(0, 1), rows, one, slice(0, key.shape[0]))
    if bias is not None:
        logits = logits + bias[0, 0]
    if visible is None:
        return logits, torch.ones_like(logits, dtype=torch.bool)
    return logits, visible[0, 0].expand_as(logits)


class _Observer:
    """Numbers the calls of one forward and hands them on."""

    def __init__(self, tell: TellCall) -> None:
        self._tell = tell
        self.calls = 0
        self.error: Exception | None = None

    def observe(self, site: Site, call: AttentionCall) -> None:
        number, self.calls = self.calls, self.calls + 1
        if self.error is None:
            self._tell(number, site.path, call)

    def sample_sequences(self, site: Site, batch: int) -> slice:
        return slice(0, 1)

    def sample(self, site: Site, call: AttentionCall) -> Any:
        # the model may go on to overwrite them before the values come
        return replace(call, logits=None if call.logits is None else call.logits.clone())

    def complete(self, site: Site, token: Any, value: Tensor | None) -> None:
        self.observe(site, replace(token, value=value))

    def fault(self, site: Site, error: Exception) -> None:
        if self.error is None:
            self.error = error
