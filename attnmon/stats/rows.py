"""The arithmetic of a block of rows: logits in, one number per row and metric out.

Weights stay unnormalised, e = exp(z - max z), so the largest is exactly 1, and Z is their sum. Whatever would
cancel near one-hot rows is rearranged so that it does not: sums run over the K largest entries and over the
rest apart, and the largest entry itself only ever enters analytically. ``reference.py`` says what each number
is; here is how to get it in few passes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmon.stats.geometry import selection_geometry
from attnmon.stats.jacobian import EIGENVALUE_CANDIDATES, scaled_eigenvalue
from attnmon.stats.selection import largest

HIDDEN = -1e30
"""Logit of a masked key: finite, so that 0 * HIDDEN is 0 and not NaN."""

EXPM1_LIMIT = 1.0  # of eps / tau, which bounds |a|; far beyond, 1 + expm1(a) and its squares lose digits
_LEAST_EXPONENT = {torch.float32: -36.0, torch.float64: -300.0}
_MAX_SINK_LEAD = 80.0  # of a sink's logit over the largest key's; exp of more overflows, all weights are ~0


@dataclass(frozen=True, slots=True)
class Visible:
    """Which keys rows see; every tensor broadcasts to [S, H, R, Lk].

    Attributes:
        mask: bool, None if all keys are visible.
        weight: ``mask`` as float32.
        shift: float32 to add to logits: the bias, and HIDDEN at masked keys.
        count: n, float32 [S, 1 or H, R], or the number of keys.
    """

    mask: Tensor | None
    weight: Tensor | None
    shift: Tensor
    count: Tensor | int

    @classmethod
    def of(cls, mask: Tensor | None, bias: Tensor | None, num_keys: int, dtype: torch.dtype) -> Visible:
        if mask is None:
            assert bias is not None
            return cls(None, None, bias.to(dtype), num_keys)
        weight = mask.to(dtype)
        shift = (weight - 1.0) * -HIDDEN
        if bias is not None:
            shift = torch.where(mask, bias.to(dtype), HIDDEN)
        return cls(mask, weight, shift, weight.sum(-1))


@dataclass(frozen=True, slots=True)
class RowInputs:
    """A block of rows.

    Attributes:
        z: float32 [S, H, R, Lk], scale * q.k (or finished logits, then ``softcap`` is None and masked entries
            lie at or above HIDDEN but far below any logit); overwritten.
        visible: None if every row sees every key.
        tau: temperature relative to 1/sqrt(D).
        softcap: c, or None.
        sinks: float32 [H] or None.
        tokens: float32 [S, Hkv or 1, Lk, E], or None.
        inverse_length: float32 [S, Hkv or 1, Lk], what tokens are multiplied by to give x; None for 1.
        perturbation: a = eps v / tau, float32 [S, 1 or H, R, Lk], 0 at masked keys, or expm1 of it; or None.
        perturbation_is_expm1: which of the two; expm1 wherever eps / tau is at most ``EXPM1_LIMIT``.
        fd_epsilon: eps.
        first_key: int64 [S, R], perhaps out of range (then no row sees it), or None for 0.
        top_n: N.
        robust: see ``streaming``.
    """

    z: Tensor
    visible: Visible | None
    tau: float
    softcap: float | None
    sinks: Tensor | None
    tokens: Tensor | None
    inverse_length: Tensor | None
    perturbation: Tensor | None
    perturbation_is_expm1: bool
    fd_epsilon: float
    first_key: Tensor | None
    top_n: int
    robust: bool


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """Per row, [S, H, R]: the metrics, whether every visible logit was finite, and n (broadcastable)."""

    values: dict[str, Tensor]
    finite: Tensor
    num_keys: Tensor


def row_metrics(inputs: RowInputs, wanted: Collection[str]) -> RowOutputs:
    """All of ``wanted`` that the inputs allow; rows that are not finite or see nothing hold garbage."""
    num_keys = inputs.z.shape[-1]
    values: dict[str, Tensor] = {}
    z = _final_logits(inputs, values)
    weight = None if inputs.visible is None else inputs.visible.weight
    count = num_keys if inputs.visible is None else inputs.visible.count
    n = count if isinstance(count, Tensor) else z.new_full((1, 1, 1), float(count))

    largest_logit = z.amax(-1)
    values["max_logit"] = largest_logit
    d = z.sub_(largest_logit[..., None])  # <= 0; masked keys hugely negative
    seen = d if weight is None else d * weight
    mean = seen.sum(-1) / n.clamp(min=1.0)
    # a masked key with a logit so large that HIDDEN does not hide it is garbage, to be looked at again
    finite = (largest_logit < (math.inf if inputs.robust else -HIDDEN / 100)) & mean.isfinite()
    if inputs.sinks is not None:
        finite &= (inputs.sinks < math.inf)[:, None]
    centred = seen - mean[..., None] if weight is None else torch.addcmul(seen, mean[..., None], weight, value=-1)
    values["logit_std"] = (_square_sum(centred) / n.clamp(min=1.0)).sqrt()
    del seen, centred

    count_top = min(num_keys, max(inputs.top_n + 1, EIGENVALUE_CANDIDATES))
    d_top, index = largest(d, count_top, min(inputs.top_n, count_top), HIDDEN / 2)
    e = _exp(d)
    if weight is not None:
        e *= weight
    e_top = e.gather(-1, index)
    tail = e.scatter_(-1, index, 0.0)  # the rest; also 0 at masked keys
    tail_sum = tail.sum(-1)
    tail_square = _square_sum(tail)

    # outcomes besides the largest key: the other keys and the sink
    lead = sink = None
    others = e_top[..., 1:].sum(-1) + tail_sum
    key_total = 1.0 + others
    if inputs.sinks is not None:
        lead = (inputs.sinks[:, None] - largest_logit).clamp(-1e4, _MAX_SINK_LEAD)
        sink = torch.exp(lead)
        others = others + sink
    total = 1.0 + others
    values["max_prob"] = 1.0 / total
    values["top_mass"] = e_top[..., : inputs.top_n].sum(-1) / total
    values["first_mass"] = _first_mass(inputs, tail, e_top, index) / total

    # H = log Z - E[d]; with a dominating sink log Z is taken relative to it
    spread = _dot(tail, d) + (e_top[..., 1:] * d_top[..., 1:]).sum(-1)
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
        values["jacobian"] = root / total / inputs.tau
        values["jacobian_max"] = values["jacobian"]
    if inputs.perturbation is not None:
        weights = _Weights(d, index, e_top, tail, tail_sum, tail_square, others, lead)
        step = _small_step if inputs.perturbation_is_expm1 else _large_step
        values["jacobian_fd"] = step(inputs.perturbation, weights) / inputs.fd_epsilon
    if inputs.tokens is not None:
        values["separability"], values["distance"] = selection_geometry(
            tokens=inputs.tokens,
            inverse_length=inputs.inverse_length,
            tail=tail,
            e_top=e_top,
            index=index,
            weight=weight,
            visible=None if inputs.visible is None else inputs.visible.mask,
            n=n,
            total=total,
            top_n=inputs.top_n,
            masked_search=inputs.robust,
        )
    return RowOutputs({name: values[name] for name in values if name in wanted or name == "logit_std"}, finite, n)


def _final_logits(inputs: RowInputs, values: dict[str, Tensor]) -> Tensor:
    z = inputs.z
    visible = inputs.visible
    if inputs.softcap is not None:
        uncapped = z
        if visible is not None:
            uncapped = z + visible.shift
            if inputs.robust and visible.mask is not None:
                uncapped = torch.where(visible.mask, uncapped, HIDDEN)
        values["max_logit_uncapped"] = uncapped.amax(-1)
        z = torch.tanh(z / inputs.softcap) * inputs.softcap
    if visible is not None:
        z = z.add_(visible.shift)
        if inputs.robust and visible.mask is not None:
            z = torch.where(visible.mask, z, HIDDEN)
    return z


def _first_mass(inputs: RowInputs, tail: Tensor, e_top: Tensor, index: Tensor) -> Tensor:
    """e of the sequence's first key: in the tail, or among the largest."""
    if inputs.first_key is None:
        among = (index == 0).to(e_top.dtype)
        return tail[..., 0] + (e_top * among).sum(-1)
    first = inputs.first_key[:, None, :, None]
    among = (index == first).to(e_top.dtype)
    # a key outside the block's range is seen by none of its rows
    at = first.clamp(0, tail.shape[-1] - 1)
    in_tail = tail.gather(-1, at.expand(-1, tail.shape[1], -1, -1)) * (at == first)
    return in_tail[..., 0] + (e_top * among).sum(-1)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Unnormalised weights of a block, as ``row_metrics`` has them."""

    d: Tensor
    index: Tensor
    e_top: Tensor
    tail: Tensor
    tail_sum: Tensor
    tail_square: Tensor
    others: Tensor
    lead: Tensor | None

    @property
    def sink(self) -> Tensor | None:
        return None if self.lead is None else torch.exp(self.lead)


def _small_step(x: Tensor, weights: _Weights) -> Tensor:
    """|softmax(z + a) - softmax(z)|, given x = expm1(a).

    With y_j = x_j - x_t, t the largest key, and E = sum p y, key j's weight changes by
    p_j (y_j - E) / (1 + x_t + E). The largest key has y = 0 exactly, so nothing of order one is subtracted.
    """
    tail = weights.tail
    x_top = x.expand_as(tail).gather(-1, weights.index)
    x_largest = x_top[..., 0]
    y_top = x_top - x_top[..., :1]
    tail_x = tail * x
    square_x = _dot(tail, tail_x)
    shift = (weights.e_top * y_top).sum(-1) + tail_x.sum(-1) - x_largest * weights.tail_sum
    if weights.sink is not None:
        shift = shift - weights.sink * x_largest
    total = 1.0 + weights.others
    shift = shift / total
    # the rest: sum e^2 (y - E)^2, expanded around y - E = x - (x_t + E)
    origin = x_largest + shift
    rest = _square_sum(tail_x) - 2.0 * origin * square_x + origin * origin * weights.tail_square
    moved = (weights.e_top * (y_top - shift[..., None])).square().sum(-1) + rest.clamp(min=0.0)
    return moved.sqrt() / (total * (1.0 + origin))


def _large_step(a: Tensor, weights: _Weights) -> Tensor:
    """The same for steps so large that exp(a) leaves float32: through log-weights."""
    largest_key = weights.index[..., :1]
    origin = a.expand_as(weights.d).gather(-1, largest_key)
    a = a - origin
    moved = weights.d + a
    top = moved.amax(-1)
    if weights.lead is not None:
        sink_moved = weights.lead - origin[..., 0]  # a sink's logit stays where it is
        top = torch.maximum(top, sink_moved)
    e_moved = torch.exp(moved - top[..., None])
    others = e_moved.scatter(-1, largest_key, 0.0).sum(-1)
    if weights.lead is not None:
        others = others + torch.exp(sink_moved - top)
    total = torch.exp(-top) + others
    log_change = torch.where(top > 0, top + torch.log(total), torch.log1p(others)) - torch.log1p(weights.others)
    change = a - log_change[..., None]
    before = torch.exp(weights.d) / (1.0 + weights.others)[..., None]
    difference = torch.where(change < 20.0, before * torch.expm1(change.clamp(max=20.0)), e_moved / total[..., None])
    length: Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return length


def _exp(d: Tensor) -> Tensor:
    """exp(d), d <= 0, but never so small that it or its products underflow: those are many times slower.

    In float32 that keeps 15 digits below the largest weight, far more than its sums can hold.
    """
    return torch.exp(d.clamp(min=_LEAST_EXPONENT[d.dtype]))


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1)


def _square_sum(tensor: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensor, dim=-1)
    return length.square()
