import warnings

import pytest

from attnmon.errors import AttnmonError, AttnmonWarning
from attnmon.writers import FanOut, Writer
from tests.writers.records import alert, grid


class Recorder(Writer):
    def __init__(self):
        self.seen = []

    def write_snapshot(self, snapshot):
        self.seen.append(snapshot.step)

    def write_alerts(self, alerts):
        self.seen.append(len(alerts))

    def close(self):
        self.seen.append("closed")


class Broken(Recorder):
    broken = True

    def write_snapshot(self, snapshot):
        super().write_snapshot(snapshot)
        if self.broken:
            raise OSError("disk full")


def steps(fan, first, last):
    for step in range(first, last):
        fan.write_snapshot(grid(1, 1, ["entropy"], step))


def test_a_broken_writer_warns_once_is_switched_off_and_harms_no_other():
    before, broken, after = Recorder(), Broken(), Recorder()
    fan = FanOut([before, broken, after])
    with pytest.warns(
        AttnmonWarning, match=r"Broken could not write a snapshot \(OSError: disk full\); training"
    ) as seen:
        steps(fan, 0, 5)
    assert len(seen) == 1
    assert before.seen == after.seen == [0, 1, 2, 3, 4]
    assert broken.seen == [0, 1, 2]
    assert (fan.failures, fan.disabled) == ((0, 3, 0), (broken,))
    fan.close()
    assert broken.seen[-1] == "closed"


def test_a_success_in_between_keeps_a_writer_but_a_flush_does_not():
    broken = Broken()
    fan = FanOut([broken])
    with pytest.warns(AttnmonWarning):
        steps(fan, 0, 2)
    fan.flush()
    broken.broken = False
    steps(fan, 2, 3)
    broken.broken = True
    steps(fan, 3, 5)
    assert not fan.disabled
    fan.flush()
    steps(fan, 5, 7)
    assert broken.seen == [0, 1, 2, 3, 4, 5]
    assert fan.disabled == (broken,)


def test_warnings_as_errors_still_reach_every_writer():
    last = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttnmonWarning):
            steps(FanOut([Broken(), last]), 0, 1)
    assert last.seen == [0]


def test_on_error_raise_raises_after_everyone_has_the_record():
    last = Recorder()
    fan = FanOut([Broken(), Broken(), last], on_error="raise")
    for _ in range(5):
        with pytest.raises(OSError, match="disk full"):
            steps(fan, 0, 1)
    assert last.seen == [0] * 5
    assert (fan.failures, fan.disabled) == ((5, 5, 0), ())


def test_no_alerts_are_no_record_and_writers_are_checked():
    recorder = Recorder()
    fan = FanOut([recorder])
    fan.write_alerts([])
    fan.write_alerts([alert()])
    assert recorder.seen == [1]
    with pytest.raises(AttnmonError, match="lacks write_snapshot, write_alerts"):
        FanOut([print])
    with pytest.raises(AttnmonError, match="on_error must be one of 'warn', 'raise'"):
        FanOut([], on_error="ignore")
