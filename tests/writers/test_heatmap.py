import io
import math

import numpy as np
import pytest

from attnmon.metrics import METRICS
from attnmon.writers import heads_png, heatmap, render_heads
from attnmon.writers._describe import short_paths
from attnmon.writers._scale import scale_for
from attnmon.writers._viridis import VIRIDIS
from tests.writers.records import grid, snapshot

Image = pytest.importorskip("PIL.Image")


def blocks(picture, color):
    """How many pixels have this color, give or take the palette's steps."""
    return int((np.abs(picture.astype(int) - np.asarray(color, dtype=int)).max(axis=-1) <= 3).sum())


def cells_of(snap, metric, monkeypatch):
    """The plot area's pixel rows and columns of each cell's center."""
    plans = []
    plan = heatmap._plan
    monkeypatch.setattr(heatmap, "_plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    picture = render_heads(snap, metric)
    place = plans[-1]

    def cell(layer, head):
        return picture[
            place.top + layer * place.cell_height + place.cell_height // 2,
            place.left + head * place.cell_width + place.cell_width // 2,
        ]

    return cell


def test_the_color_map_is_viridis():
    colormaps = pytest.importorskip("matplotlib").colormaps
    expected = np.array(colormaps["viridis"].colors) * 255
    assert np.abs(VIRIDIS - expected).max() <= 1
    palette = heatmap._PALETTE[: heatmap._COLORS]
    between = np.linspace(0, 255, heatmap._COLORS)
    exact = np.stack([np.interp(between, np.arange(256), channel) for channel in expected.T], axis=1)
    assert np.abs(palette - exact).max() <= 1


def test_known_cells_have_the_expected_colors(monkeypatch):
    cell = cells_of(snapshot({"entropy_norm": {"a.0": [0.0, 0.5], "a.1": [1.0, 0.25]}}), "entropy_norm", monkeypatch)
    for (layer, head), position in {(0, 0): 0, (0, 1): 127.5, (1, 0): 255, (1, 1): 63.75}.items():
        np.testing.assert_allclose(cell(layer, head).astype(float), VIRIDIS[round(position)], atol=3)


def test_no_data_is_hatched_gray_and_missing_heads_are_pale(monkeypatch):
    snap = snapshot({"max_logit": {"a.0": [1.0, math.nan, 3.0], "a.1": [2.0]}, "entropy": {"b": [1.0, 1.0, 1.0]}})
    cell = cells_of(snap, "max_logit", monkeypatch)
    pale = cell(1, 1)
    assert len(set(pale.tolist())) == 1
    assert pale[0] > 220
    for place in ((0, 1), (2, 0), (2, 2)):  # NaN; a module without this metric
        gray = cell(*place)
        assert len(set(gray.tolist())) == 1
        assert gray[0] < 220
    picture = render_heads(snap, "max_logit")
    assert blocks(picture, heatmap._PALETTE[heatmap._HATCH]) > 50


def test_infinite_and_zero_values_take_the_ends_of_a_logarithmic_bar(monkeypatch):
    cell = cells_of(
        snapshot({"effective_temperature": {"a": [math.inf, 0.1, 10.0, 1.0, 0.0]}}),
        "effective_temperature",
        monkeypatch,
    )
    np.testing.assert_array_equal(cell(0, 0), VIRIDIS[255])
    np.testing.assert_array_equal(cell(0, 2), VIRIDIS[255])
    np.testing.assert_array_equal(cell(0, 1), VIRIDIS[0])
    np.testing.assert_array_equal(cell(0, 4), VIRIDIS[0])
    np.testing.assert_allclose(cell(0, 3).astype(float), VIRIDIS[128], atol=3)


@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (12, 12), (48, 64), (126, 128)], ids=str)
def test_every_shape_fits_and_png_and_array_agree(shape):
    snap = grid(*shape, ["separability"])
    png, width, height = heads_png(snap, "separability")
    picture = render_heads(snap, "separability")
    assert picture.dtype == np.uint8
    assert picture.shape == (height, width, 3)
    image = Image.open(io.BytesIO(png))
    assert image.mode == "P"
    np.testing.assert_array_equal(np.asarray(image.convert("RGB")), picture)
    assert (picture[:, -1] == 255).all()  # nothing is cut off at the right
    assert (picture[-1] == 255).all()
    assert width >= 350
    assert height <= 1700


def test_a_12_by_12_picture_is_small_and_fits_tensorboards_card():
    for metric in METRICS:
        png, width, _ = heads_png(grid(12, 12, [metric]), metric)
        assert len(png) < 6000
        assert width == 350


@pytest.mark.parametrize(
    "values", [[math.nan, math.nan], [math.inf], [0.0], [-3.0], [5.0, 5.0], [1e-30, 1e30], [-1e38, 1e38], []]
)
@pytest.mark.parametrize("metric", ["jacobian", "max_logit", "entropy_norm", "not_in_the_table"])
def test_odd_values_draw(metric, values):
    assert render_heads(snapshot({metric: {"a": values}}), metric).shape[2] == 3


def test_titles_carry_the_choices_that_a_number_depends_on():
    snap = grid(2, 2, list(METRICS), step=12)
    assert heatmap._title(snap, "separability") == "separability (N = 16, tokens = value), step 12"
    assert heatmap._title(snap, "jacobian_fd") == "jacobian_fd (eps = 0.1), step 12"
    assert heatmap._title(snap, "max_logit") == "max_logit, step 12"
    values, exists = heatmap.head_grid(snap, "max_logit")
    assert heatmap._subtitle(snap, "max_logit", values, exists).endswith("logits")


def test_an_unknown_metric_is_a_key_error():
    with pytest.raises(KeyError, match="no metric 'entropy'"):
        render_heads(grid(1, 1, ["distance"]), "entropy")


def test_scales():
    unit = scale_for("separability", np.array([0.4, 0.5]))
    assert (unit.lo, unit.hi) == (0, 1)
    linear = scale_for("max_logit", np.array([-3.2, 17.0, math.nan, math.inf]))
    assert linear.ticks == (-5, 0, 5, 10, 15, 20)
    log = scale_for("jacobian", np.array([0.003, 0.4, 0.0]))
    assert log.log
    assert log.ticks == pytest.approx((0.01, 0.1))
    assert (log.lo, log.hi) == pytest.approx((0.002, 0.5))
    assert scale_for("jacobian", np.array([1e-30, 1.0])).lo == pytest.approx(1e-6)


def test_short_paths_keep_what_tells_layers_apart():
    assert short_paths(["transformer.h.0.attn", "transformer.h.11.attn"]) == ["h.0.attn", "h.11.attn"]
    assert short_paths(["model.encoder.self_attn"]) == ["model.encoder.self_attn"]
    assert short_paths(["a.encoder.attn", "a.decoder.attn"]) == ["encoder.attn", "decoder.attn"]
    assert short_paths([]) == []
    assert short_paths([""]) == [""]
    long = [
        f"{side}.transformer.layers.{i}.multihead_cross_attention.core"
        for side in ("encoder", "decoder")
        for i in range(12)
    ]
    shorts = short_paths(long)
    assert len(set(shorts)) == 24
    assert max(map(len, shorts)) <= 26
