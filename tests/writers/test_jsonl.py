import json
import math
import warnings

import numpy as np
import pytest

from attnmon.errors import AttnmonError, AttnmonWarning
from attnmon.types import Alert, Snapshot
from attnmon.writers import JsonlWriter, read_jsonl
from tests.writers.records import RAGGED, alert, grid, snapshot


def test_records_come_back_bit_for_bit(tmp_path):
    reasons = {"padding": {"a.0": np.array([1, 2, 3]), "a.1": np.array([4])}}
    written = [snapshot(RAGGED, step=3, excluded_by_reason=reasons), grid(12, 12, ["max_logit"], step=4)]
    writer = JsonlWriter(tmp_path / "run.jsonl")
    writer.write_snapshot(written[0])
    writer.write_alerts([alert(), alert(baseline=None)])
    writer.write_snapshot(written[1])
    first, one, other, last = read_jsonl(tmp_path / "run.jsonl")
    assert (one, other) == (alert(), alert(baseline=None))
    for got, expected in ((first, written[0]), (last, written[1])):
        assert isinstance(got, Snapshot)
        assert (got.step, got.modules, dict(got.settings)) == (expected.step, expected.modules, dict(expected.settings))
        for metric, by_path in expected.values.items():
            assert got[metric].keys() == by_path.keys()
            for path, heads in by_path.items():
                assert got[metric][path].tobytes() == heads.tobytes()
        for path, counts in expected.rows.items():
            np.testing.assert_array_equal(got.rows[path], counts)
    assert first.excluded_by_reason["padding"]["a.1"].tolist() == [4]


def test_lines_are_strict_json_whatever_the_numbers(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = JsonlWriter(path)
    odd = {"limit": math.inf, "where": tmp_path, "n": np.int64(3), "names": ("a", "b"), 5: {"x": np.float32("nan")}}
    writer.write_snapshot(snapshot({"effective_temperature": {"a": [math.nan, math.inf, 1.0]}}, settings=odd))
    writer.write_alerts([alert(value=math.nan, threshold=-math.inf)])

    def refuse(token):
        raise AssertionError(token)

    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert (first["kind"], first["schema"], second["kind"], second["schema"]) == ("snapshot", 1, "alert", 1)
    assert first["values"]["effective_temperature"]["a"] == [None, None, 1.0]
    assert first["settings"] == {"limit": None, "where": str(tmp_path), "n": 3, "names": ["a", "b"], "5": {"x": None}}
    back, bad = read_jsonl(path)
    assert np.isnan(back["effective_temperature"]["a"][:2]).all()
    assert isinstance(bad, Alert)
    assert math.isnan(bad.value)


def test_nothing_is_created_before_the_first_record_and_a_directory_gets_the_default_name(tmp_path):
    writer = JsonlWriter(tmp_path / "deep" / "run1.5")
    writer.flush()
    writer.close()
    assert not (tmp_path / "deep").exists()
    writer.write_alerts([alert()])
    assert writer.path == tmp_path / "deep" / "run1.5" / "attnmon.jsonl"
    assert list(read_jsonl(tmp_path / "deep" / "run1.5")) == [alert()]


def test_a_resumed_run_appends_also_after_a_torn_line(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = JsonlWriter(path)
    writer.write_alerts([alert(1), alert(2)])
    writer.close()
    path.write_bytes(path.read_bytes()[:-20])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an unfinished last line is what a running writer looks like
        assert [record.step for record in read_jsonl(path)] == [1]
    JsonlWriter(path).write_alerts([alert(3)])
    with pytest.warns(AttnmonWarning, match=r"1 unreadable line passed over, the first is line 2"):
        assert [record.step for record in read_jsonl(path)] == [1, 3]


def test_a_file_whose_last_line_only_lacks_its_end_loses_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    JsonlWriter(path).write_alerts([alert(1)])
    path.write_bytes(path.read_bytes()[:-1])
    JsonlWriter(path).write_alerts([alert(2)])
    assert [record.step for record in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize(
    "junk", [b"[]", b'"text"', b"{}", b'{"kind":"alert","schema":1}', b"\xff\xfe", b'{"kind":"snap']
)
def test_damaged_lines_cost_only_themselves(tmp_path, junk):
    path = tmp_path / "run.jsonl"
    JsonlWriter(path).write_alerts([alert(1)])
    with path.open("ab") as file:
        file.write(junk + b"\n\n" + b'{"kind":"future","schema":1}\n')
    JsonlWriter(path).write_alerts([alert(2)])
    with pytest.warns(AttnmonWarning, match="line 2"):
        assert [record.step for record in read_jsonl(path)] == [1, 2]


def test_reading_says_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "new.jsonl").write_text('{"kind":"alert","schema":99}\n')
    with pytest.raises(AttnmonError, match="got schema 99"):
        list(read_jsonl(tmp_path / "new.jsonl"))


def test_a_failed_write_is_reported_and_the_next_one_starts_on_a_line_of_its_own(tmp_path):
    class FullDisk:
        def write(self, data):
            raw.write(data[:30])
            raw.flush()
            raise OSError(28, "No space left on device")

        def close(self):
            raw.close()

    writer = JsonlWriter(tmp_path / "run.jsonl")
    writer.write_alerts([alert(1)])
    raw, writer._file = writer._file, FullDisk()
    with pytest.raises(OSError, match="No space"):
        writer.write_alerts([alert(2)])
    writer.write_alerts([alert(3)])
    with pytest.warns(AttnmonWarning):
        assert [record.step for record in read_jsonl(writer.path)] == [1, 3]
