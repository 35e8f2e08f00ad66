import pytest

from attnmon.errors import AttnmonError
from attnmon.rules import NonFinite, RuleSet

NAN = float("nan")


def feed(rules, snapshot, counts, values=None):
    """counts: per step, [head 0, head 1]."""
    alerts = []
    for step, pair in enumerate(counts):
        numbers = [1.0, 1.0] if values is None else values[step]
        alerts += rules.update(snapshot(step, {"max_logit": {"a": numbers}}, {"a": pair}))
    return alerts


def test_at_once_and_for_the_right_head(snapshot):
    rules = RuleSet([NonFinite()])
    (alert,) = feed(rules, snapshot, [[0, 0], [0, 3]])
    assert (alert.step, alert.rule, alert.severity, alert.module, alert.head) == (1, "non_finite", "critical", "a", 1)
    assert (alert.metric, alert.value, alert.baseline, alert.threshold) == ("nonfinite_rows", 3.0, None, 0.0)
    assert alert.message.startswith("head 1 of a: 3 measured rows had a NaN or infinite logit.")
    assert rules.open_alerts == [alert]


def test_a_head_without_any_valid_row_is_told_too(snapshot):
    (alert,) = feed(RuleSet([NonFinite()]), snapshot, [[128, 0]], [[NAN, 1.0]])
    assert alert.head == 0


def test_not_repeated_until_clear(snapshot):
    rules = RuleSet([NonFinite()])
    bad, good = [1, 0], [0, 0]
    assert len(feed(rules, snapshot, [bad, bad, *[good] * 4, bad, *[good] * 4, bad])) == 1
    assert feed(rules, snapshot, [good] * 5) == []
    assert rules.open_alerts == []
    assert len(feed(rules, snapshot, [bad])) == 1


def test_steps_without_rows_do_not_clear(snapshot):
    rules = RuleSet([NonFinite()])
    feed(rules, snapshot, [[1, 0]])
    feed(rules, snapshot, [[0, 0]] * 20, [[NAN, 1.0]] * 20)
    assert len(rules.open_alerts) == 1


def test_bad_parameters():
    with pytest.raises(AttnmonError, match="NonFinite: clear_steps must be a whole number of at least 1; got 0"):
        NonFinite(clear_steps=0)
