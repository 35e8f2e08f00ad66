import io
import math
import sys

import pytest

from attnmon.errors import AttnmonWarning
from attnmon.writers import ConsoleWriter, heads_table
from tests.writers.records import RAGGED, alert, grid, snapshot


def test_prints_alerts_and_nothing_else(capsys):
    writer = ConsoleWriter()
    writer.write_snapshot(grid(2, 2, ["entropy_norm"]))
    assert capsys.readouterr() == ("", "")
    writer.write_alerts([alert(), alert(baseline=None, severity="critical", value=math.nan)])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[attnmon] step 7 WARNING entropy_collapse: h.0.attn head 3: entropy_norm = 0.030, baseline 0.60, limit 0.30",
        "          Fell. Lower the learning rate.",
        "[attnmon] step 7 CRITICAL entropy_collapse: h.0.attn head 3: entropy_norm = nan, limit 0.30",
        "          Fell. Lower the learning rate.",
    ]


def test_snapshots_on_request_and_a_storm_is_cut():
    stream = io.StringIO()
    writer = ConsoleWriter(stream, snapshots=True, limit=2)
    writer.write_snapshot(snapshot({"entropy_norm": {"a": [0.25, 0.75]}, "max_logit": {"a": [math.nan]}}, step=5))
    writer.write_alerts([alert()] * 5)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[attnmon] step 5: mean over heads: entropy_norm 0.5"
    assert lines[-1] == "[attnmon] ... and 3 more alerts"
    assert len(lines) == 6


def test_a_broken_stream_warns_once_and_never_raises(recwarn):
    class Pipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    closed = io.StringIO()
    closed.close()
    for stream in (Pipe(), closed):
        writer = ConsoleWriter(stream)
        writer.write_alerts([alert()])
        writer.write_alerts([alert()])
    assert [warning.category for warning in recwarn] == [AttnmonWarning, AttnmonWarning]


def test_a_narrow_encoding_or_no_stream_at_all(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleWriter(stream).write_alerts([alert(message="entropie élevée")])
    assert rb"entropie \xe9lev\xe9e" in raw.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    ConsoleWriter().write_alerts([alert()])


def test_table_of_ragged_heads():
    text = heads_table(snapshot(RAGGED | {"max_logit": {"a.0": [math.nan] * 3, "a.1": [123.4]}}))
    assert text.splitlines() == [
        "attnmon: heads at step 0",
        "module      entropy_norm       separability        max_logit",
        "         min  mean   max    min  mean   max  min  mean   max",
        "a.0     0.10  0.50  0.90  0.000  0.50  1.00                -",
        "a.1     0.25  0.25  0.25                  -  123   123   123",
        "separability: N = 16, tokens = value",
    ]
    with pytest.raises(KeyError, match="no metric 'distance'"):
        heads_table(snapshot(RAGGED), ["distance"])
