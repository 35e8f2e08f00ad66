"""What the tests of capture share: numbers from weights that a model computed itself in float64, and what is seen."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnmon

EVERYTHING = {"rows": None, "sequences": None, "top_n": 3, "rules": (), "on_error": "raise"}


def randomize(model, std=0.25):
    """Weights so large that attention is far from uniform."""
    seed = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std, generator=seed)
            elif "sink" in name:
                parameter.normal_(std=1.5, generator=seed)
    return model.eval()


def of_rows(per_row, valid):
    """[B, H, Lq] -> [H]: means over the valid queries [B, Lq]."""
    if valid is None:
        return per_row.mean((0, 2))
    valid = valid[:, None].to(per_row.dtype)
    return (per_row * valid).sum((0, 2)) / valid.sum()


def entropy(weights, valid=None):
    """[H] from [B, H, Lq, Lk]; what is missing to 1 went to a learned sink, one more outcome."""
    weights = weights.detach().double()
    rest = (1.0 - weights.sum(-1)).clamp(min=0.0)
    rest = torch.where(rest < 1e-5, 0.0, rest)  # rounding is no sink
    return of_rows(torch.special.entr(weights).sum(-1) + torch.special.entr(rest), valid)


def jacobian(weights, tau, valid=None):
    """[H]: largest eigenvalue of (diag p - p p^T) / tau, by a dense eigenvalue solver."""
    p = weights.detach().double()
    matrix = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return of_rows(torch.linalg.eigvalsh(matrix)[..., -1] / tau, valid)


def assert_heads(measured, expected, rtol=1e-4, what=""):
    np.testing.assert_allclose(measured, expected.numpy(), rtol=rtol, atol=1e-6, err_msg=what)


def watched(model, *args, options=None, **kwargs):
    """(snapshot, coverage by path) of one measured step that only runs the model forward."""
    monitor = attnmon.watch(model, **{**EVERYTHING, **(options or {})})
    with monitor.step():
        model(*args, **kwargs)
    records = {record.path: record for record in monitor.coverage()}
    snapshot = monitor.flush()
    monitor.close()
    return snapshot, records


def standard_tau(scale, head_dim):
    return 1.0 / (scale * math.sqrt(head_dim))


def calls(monitor):
    """Of every module that the coverage tells of."""
    return [record.calls for record in monitor.coverage()]


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


class SeenByFunctionMode(TorchFunctionMode):
    """Everything that a function mode of the user's is told of."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


class SeenByDispatchMode(TorchDispatchMode):
    """Every operator that a dispatch mode of the user's is told of."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
