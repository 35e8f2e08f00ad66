"""The arithmetic of a block of rows: logits in, one number per row and metric out.

Weights stay unnormalized, e = exp(z - max z), so the largest is exactly 1, and Z is their sum. Whatever would
cancel near one-hot rows is rearranged so that it does not: sums run over the K largest entries and over the
rest apart, and the largest entry itself only ever enters analytically. ``reference.py`` says what each number
is; here is how to get it in few passes.

Passes over logits overwrite reused memory, for a fresh tensor of megabytes costs more in page faults than its sums. The
few largest of every row are kept as [K, S, H, R], since operations along the rows are faster than along a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from attnmon.stats.streaming.eigenvalue import EIGENVALUE_CANDIDATES, scaled_eigenvalue
from attnmon.stats.streaming.finite_step import large_step, small_step
from attnmon.stats.streaming.row_inputs import HIDDEN, RowInputs, RowOutputs
from attnmon.stats.streaming.scratch import scratch
from attnmon.stats.streaming.separation import selection_geometry
from attnmon.stats.streaming.top_keys import largest, leading

_LEAST_EXPONENT = {torch.float32: -36.0, torch.float64: -300.0}
_MAX_SINK_LEAD = 80.0  # of a sink's logit over the largest key's; exp of more overflows, all weights are ~0


def row_metrics(inputs: RowInputs, wanted: Collection[str]) -> RowOutputs:
    """Metrics of softmax rows, as far as the inputs allow; rows that are not finite or see nothing hold garbage.

    Args:
        inputs: the rows; their logits are overwritten.
        wanted: names of metrics.

    Source: paper, sections 2 to 4, as ``reference.py`` states it.
    """
    values: dict[str, Tensor] = {}
    n, weight = inputs.num_keys, inputs.weight
    z = _final_logits(inputs, values)
    few = min(z.shape[-1], max(inputs.top_n + 1, EIGENVALUE_CANDIDATES))
    found, index = largest(z, few, min(inputs.top_n, few), HIDDEN / 2)
    z_top = leading(found)
    largest_logit = z_top[0]
    values["max_logit"] = largest_logit
    d = z.sub_(largest_logit[..., None])  # <= 0; masked keys hugely negative
    work = scratch("work", d.shape, d)
    seen = d if weight is None else torch.mul(d, weight, out=work)
    mean = seen.sum(-1) / n.clamp(min=1.0)
    # a masked key with a logit so large that HIDDEN does not hide it is garbage, to be looked at again
    finite = (largest_logit < (math.inf if inputs.robust else -HIDDEN / 100)) & mean.isfinite()
    if inputs.sinks is not None:
        finite &= (inputs.sinks < math.inf)[:, None]
    if weight is None:
        centered = torch.sub(seen, mean[..., None], out=work)
    else:
        centered = seen.addcmul_(mean[..., None], weight, value=-1)
    values["logit_std"] = torch.linalg.vector_norm(centered, dim=-1) / n.clamp(min=1.0).sqrt()

    least = _LEAST_EXPONENT[d.dtype]
    d_top = z_top - largest_logit
    e_top = d_top.clamp(min=least).exp_()
    # never so small that weights or their products underflow: those are many times slower. In float32 that keeps 15
    # digits below the largest weight, far more than its sums can hold
    e = torch.clamp(d, min=least, out=scratch("weights", d.shape, d)).exp_()
    if weight is not None:
        e *= weight
        e_top *= z_top > HIDDEN / 2
    tail = e.scatter_(-1, index, 0.0)  # the rest; also 0 at masked keys
    tail_sum = tail.sum(-1)
    tail_square = torch.linalg.vector_norm(tail, dim=-1).square()

    # outcomes besides the largest key: the other keys and the sink
    lead = sink = None
    others = e_top[1:].sum(0) + tail_sum
    key_total = 1.0 + others
    if inputs.sinks is not None:
        lead = (inputs.sinks[:, None] - largest_logit).clamp(-1e4, _MAX_SINK_LEAD)
        sink = torch.exp(lead)
        others = others + sink
    total = 1.0 + others
    values["max_prob"] = total.reciprocal()
    values["top_mass"] = e_top[: inputs.top_n].sum(0) / total
    values["first_mass"] = _first_weight(inputs.first_key, tail, e_top, index) / total

    # H = log Z - E[d]; with a dominating sink log Z is taken relative to it
    spread = torch.mul(tail, d, out=work).sum(-1) + (e_top[1:] * d_top[1:]).sum(0)
    log_total = torch.log1p(others)
    if sink is not None and lead is not None:
        values["sink_mass"] = sink / total
        log_total = torch.where(lead > 0, torch.log1p(key_total / sink), log_total)
        # in units of the top outcome: d -> d - lead for keys, 0 for the sink when it leads
        spread = spread - lead.clamp(min=0.0) * key_total + torch.where(lead > 0, 0.0, sink * lead)
    entropy = log_total - spread / total
    values["entropy"] = entropy
    outcomes = n + 1.0 if sink is not None else n
    values["entropy_norm"] = entropy / torch.log(outcomes).clamp(min=1e-12)

    if "jacobian" in wanted or "jacobian_max" in wanted:
        root = scaled_eigenvalue(e_top, d_top, tail, tail_sum, tail_square, sink)
        values["jacobian"] = values["jacobian_max"] = root / (total * inputs.tau)
    if inputs.perturbation is not None:
        if inputs.perturbation_is_expm1:
            moved = small_step(inputs.perturbation, tail, index, e_top, tail_sum, tail_square, sink)
        else:
            moved = large_step(d, inputs.perturbation, index[..., :1], others, lead)
        values["jacobian_fd"] = moved / inputs.fd_epsilon
    if inputs.tokens is not None:
        values["separability"], values["distance"] = selection_geometry(
            tokens=inputs.tokens,
            inverse_length=inputs.inverse_length,
            tail=tail,
            e_top=e_top,
            index=index,
            weight=weight,
            visible=inputs.mask,
            n=n,
            total=total,
            top_n=inputs.top_n,
            masked_search=inputs.robust,
        )
    return RowOutputs({name: values[name] for name in values if name in wanted or name == "logit_std"}, finite, n)


def _final_logits(inputs: RowInputs, values: dict[str, Tensor]) -> Tensor:
    """Softcap, bias and masks, in place; and the largest logit before the softcap."""
    z, visible = inputs.z, inputs.visible
    if inputs.softcap is not None:
        uncapped = z
        if visible is not None:
            uncapped = z + visible.shift
            if inputs.robust and visible.mask is not None:
                uncapped = torch.where(visible.mask, uncapped, HIDDEN)
        values["max_logit_uncapped"] = uncapped.amax(-1)
        z = z.div_(inputs.softcap).tanh_().mul_(inputs.softcap)
    if visible is not None:
        z = z.add_(visible.shift)
        if inputs.robust and visible.mask is not None:
            z = torch.where(visible.mask, z, HIDDEN)
    return z


def _first_weight(first_key: Tensor | None, tail: Tensor, e_top: Tensor, index: Tensor) -> Tensor:
    """e of the sequence's first key: in the tail, or among the largest."""
    if first_key is None:
        return tail[..., 0] + (e_top * (index == 0).movedim(-1, 0)).sum(0)
    first = first_key[:, None, :, None]
    among = (index == first).movedim(-1, 0)
    # a key outside the block's range is seen by none of its rows
    at = first.clamp(0, tail.shape[-1] - 1)
    in_tail = tail.gather(-1, at.expand(-1, tail.shape[1], -1, -1)) * (at == first)
    return in_tail[..., 0] + (e_top * among).sum(0)
