"""Which function stands before which."""

from dataclasses import dataclass

from attnmon.capture.patching.standins import chain, retire, stand_before, standing, take_up


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
    take_up(first)
    take_up(second)
    assert standing(second) is second
    retire(second)
    assert standing(second) is first
    retire(first)
    assert standing(second) is standing(first) is standing(function) is function


def test_what_has_no_hash_or_cannot_be_referred_to_weakly_stands_alone():
    @dataclass
    class Callable:
        factor: int

        def __call__(self):
            return self.factor

    for alone in (Callable(2), None, 3):
        assert chain(alone) == [alone]
        assert standing(alone) is alone
