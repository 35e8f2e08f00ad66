"""What is on disk is whole, and is not mixed with results of other settings."""

import math
import os

import pytest

from attnmon.errors import AttnmonError
from attnmon.paper import store as module
from attnmon.paper.store import Store, check_writable, read_csv, to_csv, write_atomic, write_table

RECORDS = [
    {"experiment": "separability", "length": 32, "module": "0", "head": 0, "value": 0.1, "missing": None},
    {"experiment": "separability", "length": 32, "module": "h.1", "head": 1, "value": 1 / 3, "missing": 2},
]


def test_records_come_back_as_they_were(tmp_path):
    write_atomic(tmp_path / "a.csv", to_csv(RECORDS))
    assert read_csv(tmp_path / "a.csv") == RECORDS  # a module called "0" is still text


def test_what_is_not_a_number_stays_that(tmp_path):
    write_atomic(tmp_path / "a.csv", to_csv([{"value": math.nan, "other": math.inf}]))
    (found,) = read_csv(tmp_path / "a.csv")
    assert math.isnan(found["value"])
    assert found["other"] == math.inf


def test_a_unit_is_there_once_it_is_saved(tmp_path):
    store = Store(tmp_path / "out", {"seed": 0})
    assert not store.has("separability", 32, 0)
    store.save("separability", 32, 0, RECORDS)
    assert store.has("separability", 32, 0)
    assert not store.has("separability", 32, 1)
    assert Store(tmp_path / "out", {"seed": 0}).load("separability", 32, 0) == RECORDS


def test_a_unit_that_was_cut_off_is_not_there(tmp_path, monkeypatch):
    store = Store(tmp_path, {"seed": 0})

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        store.save("separability", 32, 0, RECORDS)
    assert not store.has("separability", 32, 0)
    assert list((tmp_path / "units").iterdir()) == []


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a.csv", "before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.raises(AttnmonError, match=r"cannot write .*a\.csv: No space left on device"):
        write_atomic(tmp_path / "a.csv", "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.csv", "before")]


def test_other_settings_are_told_and_change_nothing(tmp_path):
    Store(tmp_path, {"seed": 0, "top_n": (1, 5)}).save("separability", 32, 0, RECORDS)
    with pytest.raises(AttnmonError, match=r"other settings \(seed: 0 there, 1 now\); choose another --out, or give"):
        Store(tmp_path, {"seed": 1, "top_n": (1, 5)})
    assert Store(tmp_path, {"seed": 0, "top_n": (1, 5)}).has("separability", 32, 0)


def test_restart_drops_what_other_settings_left_and_nothing_else(tmp_path):
    Store(tmp_path, {"seed": 0}).save("separability", 32, 0, RECORDS)
    (tmp_path / "mine.txt").write_text("mine")
    assert Store(tmp_path, {"seed": 0}, restart=True).has("separability", 32, 0)
    assert not Store(tmp_path, {"seed": 1}, restart=True).has("separability", 32, 0)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_units_whose_settings_are_lost_are_not_trusted(tmp_path, content):
    Store(tmp_path, {"seed": 0}).save("separability", 32, 0, RECORDS)
    if content is None:
        (tmp_path / "settings.json").unlink()
    else:
        (tmp_path / "settings.json").write_text(content)
    with pytest.raises(AttnmonError, match="other settings"):
        Store(tmp_path, {"seed": 0})


def test_a_folder_that_cannot_be_written_is_told_and_not_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(AttnmonError, match=r"cannot write to --out .*file is not a directory"):
        check_writable(tmp_path / "file" / "deeper")
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(AttnmonError, match="no permission to write"):
        Store(tmp_path / "new", {})
    assert not (tmp_path / "new").exists()


def test_a_table_is_also_parquet_where_pyarrow_is(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = write_table(tmp_path, "table", RECORDS)
    assert [path.suffix for path in paths] == [".csv", ".parquet"]
    assert parquet.read_table(paths[1]).to_pylist() == RECORDS


def test_nothing_is_left_aside(tmp_path):
    write_table(tmp_path, "table", RECORDS)
    assert all(not name.startswith(".") for name in os.listdir(tmp_path))
