"""Which function stands before which."""

from dataclasses import dataclass

from attnmon.capture.patching.links import activate_link, active_link, chain, deactivate_link, stand_before


def stand_in_for(function):
    def stand_in():
        return function()

    stand_before(stand_in, function)
    return stand_in


def function():
    return 1


def test_what_is_put_back_is_never_out_of_use():
    first = stand_in_for(function)
    second = stand_in_for(first)
    assert chain(second) == [second, first, function]
    activate_link(first)
    activate_link(second)
    assert active_link(second) is second
    deactivate_link(second)
    assert active_link(second) is first
    deactivate_link(first)
    assert active_link(second) is active_link(first) is active_link(function) is function


def test_what_has_no_hash_or_cannot_be_referred_to_weakly_stands_alone():
    @dataclass
    class Callable:
        factor: int

        def __call__(self):
            return self.factor

    for alone in (Callable(2), None, 3):
        assert chain(alone) == [alone]
        assert active_link(alone) is alone
