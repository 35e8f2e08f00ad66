"""The spectral norm of diag(d) - U V^T, the form of many normalizers' Jacobians, without forming the matrix.

M = J^T J = D^2 + W C W^T with W = [D U, V] and C = [[0, -I], [-I, U^T U]]. By Haynsworth's inertia formula the number
of eigenvalues of M above t is

    #(d_i^2 > t) + (positive eigenvalues of -C^-1 - W^T (D^2 - t)^-1 W) - k,     C^-1 = [[-U^T U, -I], [-I, 0]],

a count of O(n k^2) work, so the largest singular value is found by bisection to the last digits. Source: ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 1 << 21  # of [rows, n, 2k] at a time
_BISECTIONS = 56  # from [0, bound] to the spacing of float64
_CUT = 0.4931  # of the interval: at one half, simple fractions of the bound would hit a d_i exactly, a pole


def spectral_norm_low_rank(diagonal: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Find the largest singular value of each diag(d) - U V^T.

    With b = max |d| + sum_j |u_j| |v_j|, an upper bound of the norm, the error is about 1e-15 b where the norm is of
    the order of b, and never much above 1e-8 b: a matrix that nearly vanishes by cancellation keeps no more.

    Args:
        diagonal: float64 [..., n], d.
        left: float64 [..., n, k], U, of a small k.
        right: float64 [..., n, k], V.

    Returns:
        float64 [...]; NaN where an input is not finite.

    Source: ours.
    """
    shape, n, k = diagonal.shape[:-1], diagonal.shape[-1], left.shape[-1]
    d, u, v = diagonal.reshape(-1, n), left.reshape(-1, n, k), right.reshape(-1, n, k)
    block = max(1, _ELEMENTS // (2 * k * n))
    parts = [
        _solve(d[start : start + block], u[start : start + block], v[start : start + block])
        for start in range(0, d.shape[0], block)
    ]
    return torch.cat(parts).view(shape) if parts else d.new_empty(shape)


def _solve(d: Tensor, u: Tensor, v: Tensor) -> Tensor:
    k = u.shape[-1]
    finite = d.isfinite().all(-1) & (u.isfinite() & v.isfinite()).all(-1).all(-1)
    d = torch.where(finite[:, None], d, 0.0)
    u, v = (torch.where(finite[:, None, None], matrix, 0.0) for matrix in (u, v))
    high = d.abs().amax(-1) + (torch.linalg.vector_norm(u, dim=1) * torch.linalg.vector_norm(v, dim=1)).sum(-1)
    # in units of the bound, so that squares of tiny numbers do not underflow
    scale = high.clamp(min=torch.finfo(d.dtype).tiny)
    d = d / scale[:, None]
    sides = torch.linalg.vector_norm(u, dim=1).sqrt().clamp(min=1e-150)[:, None]
    # the columns' lengths go where they balance: |u_j| = |v_j|
    sides_v = torch.linalg.vector_norm(v, dim=1).sqrt().clamp(min=1e-150)[:, None]
    root = scale.sqrt()[:, None, None]
    u, v = u / sides * sides_v / root, v / sides_v * sides / root
    w = torch.cat([d[..., None] * u, v], dim=-1)
    eye = torch.eye(k, dtype=d.dtype, device=d.device).expand(d.shape[0], k, k)
    minus_inverse = torch.cat(
        [torch.cat([u.mT @ u, eye], dim=-1), torch.cat([eye, torch.zeros_like(eye)], dim=-1)], dim=-2
    )
    low, top = torch.zeros_like(scale), torch.ones_like(scale)
    for _ in range(_BISECTIONS):
        middle = low + _CUT * (top - low)
        gap = (d - middle[:, None]) * (d + middle[:, None])  # d^2 - t
        gap = torch.where(gap == 0.0, torch.finfo(d.dtype).eps, gap)
        inner = minus_inverse - (w / gap[..., None]).mT @ w
        above = (gap > 0).sum(-1) + (torch.linalg.eigvalsh(inner) > 0).sum(-1) - k
        low, top = torch.where(above > 0, middle, low), torch.where(above > 0, top, middle)
    return torch.where(finite, 0.5 * (low + top) * scale, torch.nan)
