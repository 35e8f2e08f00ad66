"""The expected distance of random sets of keys (paper, arXiv 2508.17821, section 3, Theorem 1(2)).

E[d~] is the mean of d~ over all sets of N of a row's n visible keys. With y = p x, m = n - 1 and Y = sum_j y_j,

    E[d~] = (n - N)/n * sum_i | (1 + N/m) y_i - N/m Y |  +  eps,
    0 <= eps <= (n - N)/n * sum_i sqrt( N (m - N) / (m (m - 1)) * sum_{j != i} |y_j - ybar_{-i}|^2 ).

The main term alone is a lower bound; eps can be as large as it at small N, so E itself is estimated by Monte Carlo.
"E[d~] grows linearly in n" is false as printed: always E[d~] <= (n - N)/n (N + 1) max |x|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmon.checks import check_whole
from attnmon.theory.geometry import set_distance
from attnmon.theory.rows import TokenRows


def expected_distance(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """Compute the main term of E[d~], a lower bound of E[d~]. True.

    The main term is short of E[d~] by at most ``expected_distance_residual``.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        top_n: N, the size of the random sets, at least 1.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the weights' dtype, >= 0; 0 for rows with n <= N.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` is no whole number of at least 1.

    Source: paper, Theorem 1(2).
    """
    check_whole("top_n", top_n)
    rows = TokenRows(weights, tokens, visible)
    return main_term(rows, top_n).to(rows.dtype)


def expected_distance_residual(weights: Tensor, tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """Compute an upper bound of eps = E[d~] - ``expected_distance``. True.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        top_n: N, the size of the random sets, at least 1.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        [...] of the weights' dtype, >= 0; 0 for rows with n <= N.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` is no whole number of at least 1.

    Source: paper, Theorem 1(2), for eps.
    """
    check_whole("top_n", top_n)
    rows = TokenRows(weights, tokens, visible)
    return (residual_factor(rows, top_n) * residual_spread(rows)).to(rows.dtype)


def expected_distance_limit(tokens: Tensor, top_n: int, visible: Tensor | None = None) -> Tensor:
    """Compute (n - N)/n (N + 1) max |x|, an upper bound of E[d~] that does not grow with n. True.

    The weights must sum to at most 1.

    Args:
        tokens: float [..., n, E], x.
        top_n: N, the size of the random sets, at least 1.
        visible: bool [..., n] (its leading axes may be more than those of the tokens); None: all keys.

    Returns:
        [...] of the tokens' dtype; 0 for rows with n <= N.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` is no whole number of at least 1.

    Source: ours (definitions, section 3); it refutes the paper's "E[d~] grows linearly".
    """
    check_whole("top_n", top_n)
    if visible is None:
        shape = tokens.shape[:-1]
    else:
        shape = torch.broadcast_shapes(tokens.shape[:-1], visible.shape)
    rows = TokenRows(tokens.new_zeros(shape), tokens, visible)
    return (_share_outside(rows, top_n) * (top_n + 1) * rows.largest_norm).to(tokens.dtype)


def expected_distance_monte_carlo(
    weights: Tensor, tokens: Tensor, top_n: int, draws: int = 200, seed: int = 0, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Estimate E[d~] without bias, with the standard error of the estimate.

    Every row draws sets of its own, so the standard error of a mean over R rows is sqrt(sum se^2) / R.

    Args:
        weights: float32 or float64 [..., n], p; those of hidden keys are not read.
        tokens: float [n, E] shared by all rows, or [..., n, E]: x.
        top_n: N, the size of the random sets, at least 1.
        draws: sets per row, at least 2: one says nothing of its own error.
        seed: of a generator of its own; no global random state is touched.
        visible: bool, broadcastable to [..., n]; None: all keys.

    Returns:
        mean and standard error (sample standard deviation / sqrt(draws)), [...] of the weights' dtype; both 0 for
        rows with n <= N.

    Raises:
        AttnmonError: the shapes do not fit, a number is not finite, or ``top_n`` or ``draws`` is too small.

    Source: paper, Algorithms 1 to 3, which compare d~ with E[d~]; the estimator is ours.
    """
    check_whole("top_n", top_n)
    check_whole("draws", draws, least=2)
    rows = TokenRows(weights, tokens, visible)
    generator = torch.Generator(device=rows.p.device).manual_seed(seed)
    count = min(top_n, rows.p.shape[-1])
    mean = torch.zeros_like(rows.n)
    scatter = torch.zeros_like(rows.n)
    for draw in range(1, draws + 1):
        lots = torch.rand(rows.p.shape, generator=generator, dtype=torch.float64, device=rows.p.device)
        index = rows.seen(lots, 2.0).topk(count, dim=-1, largest=False).indices
        chosen = torch.zeros(rows.p.shape, dtype=torch.bool, device=rows.p.device).scatter_(-1, index, True)
        value = set_distance(rows, chosen if rows.visible is None else chosen & rows.visible)
        change = value - mean  # Welford's update
        mean += change / draw
        scatter += change * (value - mean)
    error = (scatter / (draws - 1) / draws).sqrt()
    return mean.to(rows.dtype), error.to(rows.dtype)


def main_term(rows: TokenRows, top_n: int) -> Tensor:
    """Compute the main term of E[d~].

    Args:
        rows: weights and vectors.
        top_n: N.

    Returns:
        float64 [...]; 0 where n <= N.

    Source: paper, Theorem 1(2).
    """
    m = (rows.n - 1.0).clamp(min=1.0)
    pull = (top_n / m)[..., None]
    _, lengths = rows.offsets((1.0 + pull) * rows.p, pull * rows.output, None, pull * rows.along_output)
    return _share_outside(rows, top_n) * rows.seen(lengths).sum(-1)


def residual_factor(rows: TokenRows, top_n: int) -> Tensor:
    """Compute (n - N)/n sqrt( N (m - N) / (m (m - 1)) ), which times ``residual_spread`` bounds eps.

    Args:
        rows: weights and vectors.
        top_n: N.

    Returns:
        float64 [...]; 0 where n <= N.

    Source: paper, Theorem 1(2), for eps.
    """
    m = rows.n - 1.0
    factor = (top_n * (m - top_n) / (m * (m - 1.0)).clamp(min=1.0)).clamp(min=0.0)
    return _share_outside(rows, top_n) * factor.sqrt()


def residual_spread(rows: TokenRows) -> Tensor:
    """Compute sum_i sqrt( sum_{j != i} |y_j - ybar_{-i}|^2 ), the part of the bound of eps that no N enters.

    Args:
        rows: weights and vectors.

    Returns:
        float64 [...].

    Source: paper, Theorem 1(2), for eps.
    """
    n = rows.n.clamp(min=2.0)[..., None]
    _, lengths = rows.offsets(rows.p, rows.output / n, None, rows.along_output / n)
    squares = rows.seen(lengths).square()
    without = (squares.sum(-1, keepdim=True) - squares * (n / (n - 1.0))).clamp(min=0.0)
    # the key that carries nearly all of the scatter: its difference cancels, so its term is summed anew
    widest = squares.argmax(-1, keepdim=True)
    others = rows.p.scatter(-1, widest, 0.0)
    _, apart = rows.offsets(others, rows.combine(others) / (n - 1.0), None)
    anew = rows.seen(apart).square().scatter(-1, widest, 0.0).sum(-1, keepdim=True)
    return rows.seen(without.scatter(-1, widest, anew).sqrt()).sum(-1)


def _share_outside(rows: TokenRows, top_n: int) -> Tensor:
    """Compute (n - N) / n, the chance of a key to be outside; 0 where n <= N."""
    return ((rows.n - top_n) / rows.n.clamp(min=1.0)).clamp(min=0.0)
