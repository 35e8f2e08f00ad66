"""Calls that were noted in the user's forward and are measured after it.

Inside the forward only references are kept. They are measured when the outermost watched forward has returned, or
when the tensors they hold exceed a bound; in both cases below all modes. A tensor that was changed in place in the
meantime no longer holds what the model's softmax saw: such a call is refused, and later calls of its module are
measured at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from attnmon.capture.below import below_modes, plain
from attnmon.capture.coverage import Site
from attnmon.capture.observe import Observer
from attnmon.errors import UnsupportedAttention

HELD_BYTES = 256 << 20
"""Waiting calls that hold more than this are measured before the forward ends: under activation checkpointing, or
without gradients, nothing else keeps these tensors."""

CHANGED = (
    "a tensor of the call was changed in place, or freed, before the model's forward had ended; further calls of this "
    "module are measured at once"
)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor as it was when it was noted."""

    tensor: Tensor
    version: int
    address: int
    nbytes: int  # of its storage

    @classmethod
    def of(cls, tensor: Tensor) -> _Held:
        return cls(tensor, tensor._version, tensor.data_ptr(), tensor.untyped_storage().nbytes())

    def is_unchanged(self) -> bool:
        tensor = self.tensor
        return (
            tensor._version == self.version
            and tensor.data_ptr() == self.address
            and tensor.untyped_storage().nbytes() == self.nbytes
        )


@dataclass(frozen=True, slots=True)
class _DeferredCall:
    site: Site
    measure: Callable[[], None]
    held: list[_Held]


class DeferredCalls:
    """The calls of one forward that wait to be measured, in their order.

    Args:
        observer: told of what could not be measured.
        at_once: measure each call when it is noted.
    """

    def __init__(self, observer: Observer, *, at_once: bool = False) -> None:
        self._observer, self._at_once = observer, at_once
        self._deferred: list[_DeferredCall] = []
        self._storages: set[int] = set()
        self._bytes = 0

    def add(self, site: Site, tensors: Iterable[Tensor], measure: Callable[[], None]) -> None:
        """Note a call; function modes must be off.

        Args:
            tensors: all that ``measure`` reads.
            measure: describes the call and hands it to the observer; run below all modes.

        Raises:
            UnsupportedAttention: a tensor has no numbers of its own.
        """
        read = [plain(tensor) for tensor in tensors]
        # inference tensors have no version to compare
        if self._at_once or site.at_once or any(tensor.is_inference() for tensor in read):
            self._run([_DeferredCall(site, measure, [])])
            return
        note = _DeferredCall(site, measure, [_Held.of(tensor) for tensor in read])
        self._deferred.append(note)
        for held in note.held:
            storage = held.tensor.untyped_storage().data_ptr()
            if storage not in self._storages:
                self._storages.add(storage)
                self._bytes += held.nbytes
        if self._bytes > HELD_BYTES:
            self.measure()

    def measure(self) -> None:
        """Measure all that wait, and let go of their tensors."""
        if self._deferred:
            deferred = self._deferred
            self.drop()
            self._run(deferred)

    def drop(self) -> None:
        """Let go of all that wait."""
        self._deferred, self._storages, self._bytes = [], set(), 0

    def _run(self, deferred: list[_DeferredCall]) -> None:
        with below_modes():
            for note in deferred:
                try:
                    if not all(held.is_unchanged() for held in note.held):
                        note.site.at_once = True
                        raise UnsupportedAttention(CHANGED)
                    note.measure()
                except Exception as error:  # nothing of ours may end the user's forward
                    self._observer.fault(note.site, error)
