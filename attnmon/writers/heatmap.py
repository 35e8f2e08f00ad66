"""A picture of one metric over all heads: layers down, heads across. The only file that imports Pillow."""

from __future__ import annotations

import functools
import io
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnmon.errors import MissingExtra
from attnmon.types import Snapshot
from attnmon.writers._describe import choices, pool, short_paths, unit_label
from attnmon.writers._scale import Scale, format_tick, scale_for
from attnmon.writers._viridis import VIRIDIS

# One byte per pixel: 240 colors and 16 grays, white first. A palette PNG is smaller and encodes faster than an RGB one.
_COLORS = 240
_WHITE = _COLORS
_ABSENT, _NO_DATA, _HATCH = _WHITE + 1, _WHITE + 3, _WHITE + 8
_GRAYS = np.repeat(np.linspace(255, 0, 256 - _COLORS).round().astype(np.uint8)[:, None], 3, axis=1)
_AT = np.linspace(0, 255, _COLORS)
_SHADES = np.stack([np.interp(_AT, np.arange(256), channel) for channel in VIRIDIS.T], axis=1)
_PALETTE = np.concatenate([_SHADES.round().astype(np.uint8), _GRAYS])

_TEXT, _SMALL = 13, 11  # font sizes in pixels
_BLACK, _PALE = 5, 3  # palette steps for each of a glyph's three shades
_TOP, _BOTTOM, _PAD, _BAR_WIDTH, _BAR_LEAST_HEIGHT = 58, 32, 6, 12, 120
# TensorBoard fits every picture to a card 350 pixels wide, without smoothing: at that width text stays as drawn.
_CARD = 350
_BAR_STEP = 3  # pixels per shade of the color bar: with 1 the bar takes a quarter of the PNG


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and places within a picture, in pixels.

    The cell (layer, head) begins at x = left + head * cell_width, y = top + layer * cell_height.
    """

    left: int
    top: int
    cell_width: int
    cell_height: int
    bar_left: int
    bar_height: int
    width: int
    height: int


def require_pillow() -> None:
    """Check that Pillow can be imported.

    Raises:
        MissingExtra: Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingExtra("pillow", "tensorboard", "drawing a heatmap of heads") from error


def render_heads(snapshot: Snapshot, metric: str) -> NDArray[np.uint8]:
    """Draw one metric of all heads as an RGB picture, uint8 [height, width, 3].

    The viridis colors span [0, 1] for metrics with that range. For other metrics they span the snapshot's finite
    values, widened to round ticks, on a logarithmic scale where ``METRICS[metric].log_scale``. A hatched gray cell is a
    head without data; a pale gray cell is a head that the layer does not have. Infinite values take the color at the
    end of the bar. The title names the metric, the step and the settings that the metric depends on.

    Raises:
        KeyError: the snapshot has no such metric.
        MissingExtra: Pillow is not installed.
    """
    return np.asarray(_PALETTE[_draw(snapshot, metric)])


def heads_png(snapshot: Snapshot, metric: str) -> tuple[bytes, int, int]:
    """Draw the picture of ``render_heads`` as a palette PNG.

    Returns:
        The PNG file, and the picture's width and height in pixels.

    Raises:
        KeyError: the snapshot has no such metric.
        MissingExtra: Pillow is not installed.
    """
    indices = _draw(snapshot, metric)
    from PIL import Image

    image = Image.fromarray(indices)
    image.putpalette(_PALETTE.tobytes())
    out = io.BytesIO()
    # Level 6 makes files a tenth larger, level 9 takes four times as long.
    image.save(out, format="PNG", compress_level=7)
    return out.getvalue(), image.width, image.height


def head_grid(snapshot: Snapshot, metric: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Arrange a metric as a grid; layers may have different numbers of heads.

    Returns:
        Values, float64 [layers, most heads], NaN where there is no data; and which cells are heads, bool of the same
        shape.
    """
    by_path = snapshot[metric]
    num_heads = [snapshot.num_heads(path) for path in snapshot.modules]
    values = np.full((max(len(num_heads), 1), max(num_heads, default=1) or 1), np.nan)
    exists = np.zeros(values.shape, dtype=np.bool_)
    for layer, (path, count) in enumerate(zip(snapshot.modules, num_heads, strict=True)):
        exists[layer, :count] = True
        if path in by_path:
            values[layer, : len(by_path[path])] = by_path[path]
    return values, exists


def _draw(snapshot: Snapshot, metric: str) -> NDArray[np.uint8]:
    """Draw the picture as palette indices, uint8 [height, width]."""
    require_pillow()
    values, exists = head_grid(snapshot, metric)
    scale = scale_for(metric, values)
    title, subtitle = _title(snapshot, metric), _subtitle(snapshot, metric, values, exists)
    labels = [f"{short}   {layer}" for layer, short in enumerate(short_paths(snapshot.modules))]
    plan = _plan((title, subtitle), labels, _bar_label(metric), scale, *values.shape)

    canvas = np.full((plan.height, plan.width), _WHITE, dtype=np.uint8)
    _put(canvas, title, _PAD, 14, size=_TEXT)
    _put(canvas, subtitle, _PAD, 32)
    cells = _paint_cells(values, exists, scale, plan)
    canvas[plan.top : plan.top + cells.shape[0], plan.left : plan.left + cells.shape[1]] = cells
    _put_axes(canvas, labels, values.shape[1], plan)
    _put_bar(canvas, _bar_label(metric), scale, plan)
    return canvas


def _plan(
    titles: tuple[str, str], labels: list[str], unit: str, scale: Scale, num_layers: int, num_heads: int
) -> Layout:
    left = max((_width(label) for label in labels), default=0) + 2 * _PAD
    cell_height = min(22, max(6, 220 // num_layers))
    if num_layers * _SMALL <= 1600:
        cell_height = max(cell_height, _SMALL + 1)  # room for a label on every layer
    cell_width = min(28, max(204 // num_heads, 12 if num_heads <= 64 else 6))
    bar_left = left + cell_width * num_heads + 2 * _PAD
    ticks = max(_width(format_tick(tick)) for tick in scale.ticks)
    right = max(_BAR_WIDTH + _PAD + ticks, _width(unit)) + _PAD
    plot_height = cell_height * num_layers
    bar_height = max(min(plot_height, 400), _BAR_LEAST_HEIGHT)
    return Layout(
        left=left,
        top=_TOP,
        cell_width=cell_width,
        cell_height=cell_height,
        bar_left=bar_left,
        bar_height=bar_height,
        width=max(bar_left + right, _width(titles[0], _TEXT) + 2 * _PAD, _width(titles[1]) + 2 * _PAD, _CARD),
        height=_TOP + max(plot_height + _BOTTOM, bar_height + 2 * _PAD),
    )


def _paint_cells(
    values: NDArray[np.float64], exists: NDArray[np.bool_], scale: Scale, plan: Layout
) -> NDArray[np.uint8]:
    no_data = np.isnan(values)
    positions = np.where(no_data, 0.0, scale.positions(values))
    cells = (positions * (_COLORS - 1)).round().astype(np.uint8)
    cells[no_data] = _NO_DATA
    cells[~exists] = _ABSENT
    big = cells.repeat(plan.cell_height, axis=0).repeat(plan.cell_width, axis=1)
    if no_data.any():
        rows, columns = np.ogrid[: big.shape[0], : big.shape[1]]
        big[((rows + columns) % 5 == 0) & (big == _NO_DATA)] = _HATCH
    if min(plan.cell_width, plan.cell_height) >= 8:  # a white seam tells neighbors apart
        big[plan.cell_height - 1 :: plan.cell_height] = _WHITE
        big[:, plan.cell_width - 1 :: plan.cell_width] = _WHITE
    return np.asarray(big, dtype=np.uint8)


def _put_axes(canvas: NDArray[np.uint8], labels: list[str], num_heads: int, plan: Layout) -> None:
    _put(canvas, "layer", plan.left - _PAD, plan.top - 10, align=1.0, shade=_PALE)
    for layer in range(0, len(labels), _label_stride(_SMALL + 1, plan.cell_height)):
        y = plan.top + (layer + 0.5) * plan.cell_height
        _put(canvas, labels[layer], plan.left - _PAD, y, align=1.0)
    bottom = plan.top + plan.cell_height * max(len(labels), 1)
    for head in range(0, num_heads, _label_stride(_width(str(num_heads)) + 4, plan.cell_width)):
        _put(canvas, str(head), plan.left + (head + 0.5) * plan.cell_width, bottom + 9, align=0.5)
    _put(canvas, "head", plan.left, bottom + 24, shade=_PALE)


def _put_bar(canvas: NDArray[np.uint8], unit: str, scale: Scale, plan: Layout) -> None:
    rows = np.arange(plan.bar_height) // _BAR_STEP
    shades = ((1 - rows / rows[-1]) * (_COLORS - 1)).round().astype(np.uint8)
    right = plan.bar_left + _BAR_WIDTH
    canvas[plan.top : plan.top + plan.bar_height, plan.bar_left : right] = shades[:, None]
    _put(canvas, unit, plan.bar_left, plan.top - 15, shade=_PALE)
    for tick, position in zip(scale.ticks, scale.positions(np.array(scale.ticks)), strict=True):
        y = plan.top + round((1 - float(position)) * (plan.bar_height - 1))
        canvas[y, right : right + 4] = _WHITE + 3 * _BLACK
        _put(canvas, format_tick(tick), right + 7, y)


def _title(snapshot: Snapshot, metric: str) -> str:
    chosen = choices(metric, snapshot.settings)
    return f"{metric}{f' ({chosen})' if chosen else ''}, step {snapshot.step}"


def _bar_label(metric: str) -> str:
    """Return the unit for the color bar; "dimensionless" is too wide for it and stands in the subtitle."""
    unit = unit_label(metric)
    return "" if unit == "dimensionless" else unit


def _subtitle(snapshot: Snapshot, metric: str, values: NDArray[np.float64], exists: NDArray[np.bool_]) -> str:
    pooled = pool(snapshot[metric])
    if pooled is None:
        text = "no data"
    else:
        text = f"mean {pooled.mean:.3g}   min {pooled.min:.3g}   max {pooled.max:.3g}   {unit_label(metric)}"
        if empty := int((np.isnan(values) & exists).sum()):
            text += f"   no data: {empty}"
    if infinite := int(np.isinf(values).sum()):
        text += f"   infinite: {infinite}"
    return text


def _label_stride(needed: int, available: int) -> int:
    """Return the least power of two n such that labels do not touch if every n-th one is drawn."""
    stride = 1
    while stride * available < needed:
        stride *= 2
    return stride


def _width(text: str, size: int = _SMALL) -> int:
    return int(_glyphs(text, size).shape[1])


def _put(
    canvas: NDArray[np.uint8],
    text: str,
    x: float,
    y: float,
    *,
    align: float = 0.0,
    size: int = _SMALL,
    shade: int = _BLACK,
) -> None:
    """Draw text with its middle line at ``y``; at ``x`` it begins (``align`` 0), has its center (0.5) or ends (1)."""
    glyphs = _glyphs(text, size)
    top, left = round(y - glyphs.shape[0] / 2), max(round(x - align * glyphs.shape[1]), 0)
    area = canvas[top : top + glyphs.shape[0], left : left + glyphs.shape[1]]
    np.maximum(area, _WHITE + shade * glyphs[: area.shape[0], : area.shape[1]], out=area)


@functools.lru_cache(maxsize=1024)  # pictures share most labels, and drawing them takes most of the time
def _glyphs(text: str, size: int) -> NDArray[np.uint8]:
    """Return the coverage of a text's pixels, uint8 [height, width], 0 to 3; more steps would only enlarge the PNG."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size)
    image = Image.new("L", (math.ceil(font.getlength(text)), size + 4), 0)
    # Centered on the height of a capital, the same for every text, so that neighboring labels stand level.
    ImageDraw.Draw(image).text((0, size // 2 + 2 + round(0.36 * size)), text, fill=255, font=font, anchor="ls")
    return np.asarray(image, dtype=np.uint8) // 64
