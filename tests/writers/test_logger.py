import math
import sys
import warnings

import numpy as np
import pytest

from attnmon.errors import AttnmonWarning
from attnmon.writers import FanOut
from attnmon.writers.logger import LoggerWriter
from tests.writers.records import RAGGED, alert, grid, snapshot


class Scalars:
    """A logger with numbers only, such as CSV."""

    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))


class Everything(Scalars):
    """A logger with the methods of Weights & Biases'."""

    def __init__(self):
        super().__init__()
        self.images, self.texts = [], []

    def log_image(self, key, images, step=None, **kwargs):
        self.images.append((step, key, images))

    def log_text(self, key, columns=None, data=None, dataframe=None, step=None):
        self.texts.append((step, key, columns, data))


def test_scalars_are_pooled_over_finite_heads_at_the_snapshots_step():
    logger = Scalars()
    writer = LoggerWriter(logger)
    writer.write_snapshot(snapshot(RAGGED | {"max_logit": {"a.0": [math.nan, math.inf, 4.0]}}, step=7))
    writer.write_alerts([alert()])  # nowhere to put it
    writer.flush()
    writer.close()
    [(step, metrics)] = logger.metrics
    assert step == 7
    assert metrics["attnmon/entropy_norm/mean"] == pytest.approx((0.1 + 0.5 + 0.9 + 0.25) / 4)
    assert metrics["attnmon/entropy_norm/min"] == pytest.approx(0.1)
    assert metrics["attnmon/entropy_norm/max"] == pytest.approx(0.9)
    assert metrics["attnmon/max_logit/mean"] == 4.0
    assert (metrics["attnmon/rows/total"], metrics["attnmon/excluded/total"]) == (40, 8)
    assert all(type(number) is float for number in metrics.values())


def test_a_metric_without_data_is_not_logged():
    logger = Scalars()
    LoggerWriter(logger).write_snapshot(snapshot({"entropy": {"a": [math.nan]}, "max_prob": {"a": [0.5]}}))
    assert {tag.split("/")[1] for tag in logger.metrics[0][1]} == {"max_prob", "rows", "excluded"}


def test_pictures_come_with_every_kth_snapshot():
    pytest.importorskip("PIL")
    logger = Everything()
    writer = LoggerWriter(logger, images_every=3)
    for step in range(0, 10, 2):
        writer.write_snapshot(grid(2, 3, ["entropy_norm", "max_logit"], step))
    assert [step for step, _ in logger.metrics] == [0, 2, 4, 6, 8]
    assert [(step, key) for step, key, _ in logger.images] == [
        (step, f"attnmon/heads/{metric}") for step in (0, 6) for metric in ("entropy_norm", "max_logit")
    ]
    [picture] = logger.images[0][2]
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3


def test_alerts_are_a_table_at_the_newest_alerts_step():
    logger = Everything()
    LoggerWriter(logger).write_alerts([alert(4), alert(9, module="h.5.attn")])
    [(step, key, columns, [[text]])] = logger.texts
    assert (step, key, columns) == (9, "attnmon/alerts", ["alerts"])
    assert "`h.0.attn`" in text
    assert "`h.5.attn`" in text


def test_without_pillow_pictures_are_left_out_and_scalars_go_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    logger = Everything()
    with pytest.warns(AttnmonWarning, match=r"pictures are left out.*attnmon\[tensorboard\]"):
        writer = LoggerWriter(logger)
    fan = FanOut([writer])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            fan.write_snapshot(grid(1, 1, ["entropy"], step))
        LoggerWriter(Scalars())  # nothing to leave out, nothing to say
    assert [step for step, _ in logger.metrics] == [0, 1, 2, 3, 4]
    assert logger.images == []
