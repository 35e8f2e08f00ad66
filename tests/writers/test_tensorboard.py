import io
import math
from unittest.mock import Mock

import numpy as np
import pytest

from attnmon.errors import AttnmonError
from attnmon.metrics import METRICS
from attnmon.writers import TensorBoardWriter, render_heads
from attnmon.writers._markdown import alerts_table
from tests.writers.records import RAGGED, alert, grid, snapshot

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
Image = pytest.importorskip("PIL.Image")


def read(logdir):
    events = accumulator.EventAccumulator(str(logdir), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return events.Reload()


def text_of(events, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]


def test_the_tags_are_the_contracted_ones(tmp_path):
    metrics = list(METRICS)
    reasons = {reason: {"transformer.h.0.attn": np.array([1, 2])} for reason in ("padding", "nonfinite")}
    base = grid(2, 2, metrics, step=5)
    writer = TensorBoardWriter(tmp_path)
    writer.write_snapshot(snapshot({name: base[name] for name in metrics}, step=5, excluded_by_reason=reasons))
    writer.write_alerts([alert()])
    writer.close()
    tags = read(tmp_path).Tags()
    counts = {"attnmon/rows/total", "attnmon/excluded/total", "attnmon/excluded/padding", "attnmon/excluded/nonfinite"}
    assert (
        set(tags["scalars"]) == {f"attnmon/{name}/{of}" for name in metrics for of in ("mean", "min", "max")} | counts
    )
    assert set(tags["images"]) == {f"attnmon/heads/{name}" for name in metrics}
    assert set(tags["tensors"]) == {"attnmon/alerts", "attnmon/legend"}


def test_scalars_pool_the_finite_heads_of_all_modules(tmp_path):
    writer = TensorBoardWriter(tmp_path, images_every=None)
    odd = {"max_logit": {"a.0": [math.nan, math.inf, 4.0], "a.1": [-2.0]}, "jacobian": {"a.0": [math.nan] * 3}}
    for step in (10, 20, 30):
        writer.write_snapshot(snapshot(RAGGED | odd, step=step))
    writer.close()
    events = read(tmp_path)
    expected = {
        "entropy_norm/mean": (0.1 + 0.5 + 0.9 + 0.25) / 4, "entropy_norm/min": 0.1, "entropy_norm/max": 0.9,
        "separability/mean": 0.5, "max_logit/mean": 1.0, "max_logit/min": -2.0, "max_logit/max": 4.0,
        "rows/total": 40, "excluded/total": 8,
    }  # fmt: skip
    for tag, value in expected.items():
        points = events.Scalars(f"attnmon/{tag}")
        assert [point.step for point in points] == [10, 20, 30]
        assert [point.value for point in points] == pytest.approx([value] * 3)
    assert not [tag for tag in events.Tags()["scalars"] if "/jacobian/" in tag]
    assert not events.Tags()["images"]


def test_pictures_come_first_every_kth_at_an_alert_and_last(tmp_path):
    writer = TensorBoardWriter(tmp_path, images_every=4)
    for step in range(7):
        writer.write_snapshot(grid(2, 3, ["entropy_norm", "max_logit"], step))
        if step == 2:
            writer.write_alerts([alert(2), alert(2, metric="distance"), alert(1, metric="max_logit")])
    writer.close()
    events = read(tmp_path)
    assert [image.step for image in events.Images("attnmon/heads/entropy_norm")] == [0, 2, 4, 6]
    assert [image.step for image in events.Images("attnmon/heads/max_logit")] == [0, 4, 6]
    last = events.Images("attnmon/heads/max_logit")[-1]
    picture = np.asarray(Image.open(io.BytesIO(last.encoded_image_string)).convert("RGB"))
    np.testing.assert_array_equal(picture, render_heads(grid(2, 3, ["entropy_norm", "max_logit"], 6), "max_logit"))
    assert (last.height, last.width) == picture.shape[:2]


def test_alerts_are_one_growing_table_newest_first_and_bounded(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write_alerts([alert(1)])
    writer.write_alerts([alert(step) for step in range(2, 131)])
    writer.close()
    (first_step, first), (step, text) = text_of(read(tmp_path), "attnmon/alerts")
    assert (first_step, step) == (1, 130)
    assert first.splitlines()[2].startswith(
        "| 1 | warning | `entropy_collapse` | `h.0.attn` | 3 | `entropy_norm` | 0.03 | 0.6 |"
    )
    rows = text.splitlines()[2:102]
    assert [int(row.split("|")[1]) for row in rows] == list(range(130, 30, -1))
    assert text.endswith("30 earlier alerts not shown.")


def test_a_table_survives_what_a_message_may_contain():
    from markdown import markdown

    odd = alert(message="a | b\nc <script> *d* `e` _f_ \\ [g](h)", module="enc_a_b.x|y", value=math.nan, baseline=None)
    html = markdown(alerts_table([odd], 1), extensions=["markdown.extensions.tables"])
    assert html.count("<td>") == 9
    assert "<td>not finite</td>\n<td>-</td>" in html
    cell = html.split("<td>")[9].split("</td>")[0]
    assert cell == "a | b c &lt;script&gt; *d* `e` _f_ \\<br>[g](h)"
    assert "<code>enc_a_b.x|y</code>" in html
    long = alert(module="model.language_model.decoder.layers.31.self_attn.inner")
    assert "`model.language_model`<br>`.decoder.layers.31`<br>`.self_attn.inner`" in alerts_table([long])


def test_the_legend_names_choices_and_units(tmp_path):
    with_legend = TensorBoardWriter(tmp_path)
    for step in range(2):
        with_legend.write_snapshot(grid(1, 1, ["separability", "max_logit", "jacobian_fd"], step))
    with_legend.close()
    [(_, text)] = text_of(read(tmp_path), "attnmon/legend")
    assert "N = 16, tokens = value" in text.replace("<br>", " ")
    assert "eps = 0.1" in text
    assert "logits" in text


def test_a_given_summary_writer_is_used_and_stays_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    given = SummaryWriter(tmp_path)
    writer = TensorBoardWriter(summary_writer=given)
    writer.write_snapshot(grid(1, 1, ["entropy"]))
    writer.close()
    given.add_scalar("loss", 1.0, 0)
    given.close()
    TensorBoardWriter(summary_writer=given).close()
    assert len(list(tmp_path.iterdir())) == 1
    assert {"loss", "attnmon/entropy/mean"} <= set(read(tmp_path).Tags()["scalars"])
    writer.write_snapshot(grid(1, 1, ["entropy"], 1))  # a SummaryWriter opens again when it is used again
    given.close()
    assert [point.step for point in read(tmp_path).Scalars("attnmon/entropy/mean")] == [0, 1]


def test_any_logger_with_the_add_methods_will_do():
    logger = Mock(spec=["add_scalar", "add_image", "add_text", "flush"])
    writer = TensorBoardWriter(summary_writer=logger)
    writer.write_snapshot(grid(1, 2, ["entropy"], 3))
    writer.write_alerts([alert()])
    writer.flush()
    writer.close()
    assert {call.args[0] for call in logger.add_scalar.call_args_list} >= {"attnmon/entropy/mean", "attnmon/rows/total"}
    assert logger.add_image.call_args.args[0] == "attnmon/heads/entropy"
    assert [call.args[0] for call in logger.add_text.call_args_list] == ["attnmon/legend", "attnmon/alerts"]


def test_no_file_before_the_first_record_and_a_closed_writer_opens_again(tmp_path):
    writer = TensorBoardWriter(tmp_path / "run")
    writer.flush()
    writer.close()
    assert not (tmp_path / "run").exists()
    for step in range(2):
        writer.write_snapshot(grid(1, 1, ["entropy"], step))
        writer.close()
    assert [point.step for point in read(tmp_path / "run").Scalars("attnmon/entropy/mean")] == [0, 1]


def test_event_files_stay_small(tmp_path):
    writer = TensorBoardWriter(tmp_path, images_every=None)
    writer.write_snapshot(grid(12, 12, list(METRICS)))
    writer.flush()
    [file] = tmp_path.iterdir()
    before = file.stat().st_size
    writer.write_snapshot(grid(12, 12, list(METRICS), 1))
    writer.close()
    assert file.stat().st_size - before < 2000


def test_mistakes_are_named(tmp_path):
    with pytest.raises(AttnmonError, match="both logdir and summary_writer"):
        TensorBoardWriter(tmp_path, summary_writer=Mock())
    with pytest.raises(AttnmonError, match=r"images_every must be a whole number of at least 1 or None .* got 0"):
        TensorBoardWriter(tmp_path, images_every=0)
