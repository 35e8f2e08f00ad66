"""Lemma 1 on rows of every kind."""

import math

import pytest
import torch

from attnmon.errors import AttnmonError
from attnmon.stats.reference import row_stats
from attnmon.theory import entropy_bounds, weight_bounds
from tests.theory.cases import SLACK, rows


def test_lemma_1_bounds_hold_on_every_kind_of_row():
    for row in rows():
        z, mask = torch.tensor(row.z), torch.tensor(row.visible)
        low, high = (float(value) for value in weight_bounds(z, mask))
        assert low <= row.p.min() * SLACK
        assert row.p.max() <= high * SLACK
        low, high = (float(value) for value in entropy_bounds(z, mask))
        entropy = row_stats(row.z[row.visible])["entropy"]
        assert low <= entropy * SLACK + 1e-12
        assert entropy <= high * SLACK
        n, rho = row.visible.sum(), row.z[row.visible].max() - row.z[row.visible].min()
        assert high == pytest.approx(math.log(n), rel=1e-15)
        assert low == pytest.approx(max(0.0, math.log(n) - rho), abs=1e-12)


def test_weight_bounds_are_reached():
    """One logit above n - 1 equal ones reaches the upper bound, one below them the lower."""
    for gap in (0.1, 3.0, 30.0):
        z = torch.zeros(2, 7, dtype=torch.float64)
        z[0, 3], z[1, 3] = gap, -gap
        p = torch.softmax(z, -1)
        low, high = weight_bounds(z)
        assert float(high[0]) == pytest.approx(float(p[0, 3]), rel=1e-12)
        assert float(low[1]) == pytest.approx(float(p[1, 3]), rel=1e-12)


def test_bounds_of_degenerate_rows():
    z = torch.tensor([[2.0, 5.0, -1000.0], [0.0, 0.0, 0.0], [1.0, 900.0, 0.0]])
    visible = torch.tensor([[False, True, False], [False, False, False], [True, True, True]])
    low, high = weight_bounds(z, visible)
    assert (low[0], high[0]) == (1.0, 1.0)
    assert low[1].isnan()
    assert high[1].isnan()
    assert (low[2], high[2]) == (0.0, 1.0)  # e^900 overflows, the bound does not
    assert entropy_bounds(z, visible)[0][2] == 0.0
    assert low.dtype == torch.float32


def test_masks_must_be_bool_and_fit():
    with pytest.raises(AttnmonError, match="bool"):
        weight_bounds(torch.zeros(3), torch.ones(3))
    with pytest.raises(AttnmonError, match="broadcast"):
        weight_bounds(torch.zeros(3), torch.ones(4, dtype=torch.bool))
