"""Critical N of the paper (arXiv 2508.17821, Algorithm 3): where a top-N set is no longer told from a random one.

The first N of a list at which a two-sample Kolmogorov-Smirnov test of the heads' mean d~ against their mean E[d~] does
not reject at the given level. The paper's text says 0.01, its algorithm 0.05; here it is a parameter. "Critical N is
0.06 L for any model" is false as printed: it is an observation on one model. The test is SciPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from attnmon.checks import check_number
from attnmon.errors import AttnmonError, MissingExtra

Floats = NDArray[np.float64]


def critical_n(
    top_n: Sequence[int],
    distances: ArrayLike | torch.Tensor,
    expected: ArrayLike | torch.Tensor,
    level: float = 0.01,
) -> int | None:
    """Find the first N at which the test no longer separates the heads' d~ from their E[d~].

    Args:
        top_n: the K values of N, ascending.
        distances: float [K, S], d~ for each N: S numbers, one per head (its mean over rows).
        expected: float [K, S'], E[d~] for each N; S' may differ from S.
        level: of each test, in (0, 1): separated means a p-value below it.

    Returns:
        N, or None if the test separates them at every N.

    Raises:
        AttnmonError: the shapes do not fit, N do not ascend, the level is outside (0, 1), or a number is not finite.
        MissingExtra: SciPy is absent.

    Source: paper, Algorithm 3.
    """
    first = float(critical_ns(top_n, distances, expected, level))
    return None if np.isnan(first) else int(first)


def critical_ns(
    top_n: Sequence[int],
    distances: ArrayLike | torch.Tensor,
    expected: ArrayLike | torch.Tensor,
    level: float = 0.01,
) -> Floats:
    """Find the critical N of many series at once.

    Args:
        top_n: the K values of N, ascending.
        distances: float [..., K, S], d~ for each N: S numbers, one per head.
        expected: float [..., K, S'], E[d~] for each N; S' may differ from S.
        level: of each test, in (0, 1): separated means a p-value below it.

    Returns:
        float64 [...], N; NaN where the test separates them at every N.

    Raises:
        AttnmonError: the shapes do not fit, N do not ascend, the level is outside (0, 1), or a number is not finite.
        MissingExtra: SciPy is absent.

    Source: paper, Algorithm 3.
    """
    first, second, numbers = _array(distances), _array(expected), [int(number) for number in top_n]
    if first.ndim < 2 or second.ndim < 2 or first.shape[:-1] != second.shape[:-1] or first.shape[-2] != len(numbers):
        raise AttnmonError(
            f"expected samples [..., {len(numbers)}, heads], one series for each N; "
            f"got {list(first.shape)} and {list(second.shape)}"
        )
    if not numbers or numbers != sorted(set(numbers)):
        raise AttnmonError(f"top_n must be ascending and not empty, got {numbers}")
    check_number("level", level, below=1.0)
    kept = ks_test(first, second)[1] >= level
    critical = np.asarray(numbers, dtype=np.float64)[kept.argmax(-1)]
    return np.where(kept.any(-1), critical, np.nan)


def ks_test(first: ArrayLike | torch.Tensor, second: ArrayLike | torch.Tensor) -> tuple[Floats, Floats]:
    """Run the two-sample Kolmogorov-Smirnov test along the last axis of many pairs of samples.

    The statistics of all pairs are computed at once. A p-value depends on the statistic and the two sizes alone, so
    SciPy (``scipy.stats.ks_2samp``, its defaults) is asked once for each distinct statistic, not once for each pair.

    Args:
        first: float [..., S].
        second: float [..., S'], with the same leading axes.

    Returns:
        statistic in [0, 1] and two-sided p-value, float64 [...].

    Raises:
        AttnmonError: a sample is empty or not finite, or the leading axes differ.
        MissingExtra: SciPy is absent.

    Source: paper, experiment 3 and Algorithm 3; the test is SciPy's.
    """
    a, b = _array(first), _array(second)
    if a.ndim < 1 or b.ndim < 1 or a.shape[:-1] != b.shape[:-1]:
        raise AttnmonError(f"the samples' leading axes differ: {list(a.shape)} and {list(b.shape)}")
    if not (a.shape[-1] and b.shape[-1] and np.isfinite(a).all() and np.isfinite(b).all()):
        raise AttnmonError("both samples of a Kolmogorov-Smirnov test must be finite and not empty")
    shape, sizes = a.shape[:-1], (a.shape[-1], b.shape[-1])
    a, b = a.reshape(-1, sizes[0]), b.reshape(-1, sizes[1])
    # in units of 1 / (S S'), so that equal statistics are equal integers
    steps = _largest_gap(a, b)
    distinct, representative, inverse = np.unique(steps, return_index=True, return_inverse=True)
    test = _scipy_stats().ks_2samp
    p_values = np.array([float(test(a[at], b[at]).pvalue) for at in representative], dtype=np.float64)
    statistic = distinct[inverse] / (sizes[0] * sizes[1])
    return statistic.reshape(shape), p_values[inverse.reshape(-1)].reshape(shape)


def _largest_gap(a: Floats, b: Floats) -> NDArray[np.int64]:
    """Compute S S' max |F_a - F_b| of each pair, an integer."""
    joint = np.concatenate([a, b], axis=-1)
    order = joint.argsort(-1, kind="stable")
    ordered = np.take_along_axis(joint, order, -1)
    rise = np.where(order < a.shape[-1], b.shape[-1], -a.shape[-1]).cumsum(-1)
    # within a run of equal values the distribution functions have not yet both jumped
    last = np.ones_like(rise, dtype=bool)
    last[:, :-1] = ordered[:, 1:] != ordered[:, :-1]
    gaps: NDArray[np.int64] = np.where(last, np.abs(rise), 0).max(-1).astype(np.int64)
    return gaps


def _array(values: ArrayLike | torch.Tensor) -> Floats:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise MissingExtra("scipy", "paper", "the two-sample Kolmogorov-Smirnov test") from error
    return stats
