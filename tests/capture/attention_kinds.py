"""Small attention modules, one for each way of calling attention in plain torch, and a model of two."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, HEADS = 16, 2


class SdpaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class EagerAttention(SdpaAttention):
    def attend(self, q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class EinsumAttention(SdpaAttention):
    def attend(self, q, k, v):
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5, -1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)


class MhaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


KINDS = {"sdpa": SdpaAttention, "eager": EagerAttention, "einsum": EinsumAttention, "mha": MhaAttention}


class Model(nn.Module):
    def __init__(self, kind, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def inputs(batch=2, length=6, seed=1):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


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
