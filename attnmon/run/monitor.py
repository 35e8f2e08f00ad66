"""The monitor: when to measure, what becomes of it. One snapshot per measured optimizer step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from attnmon.capture import CoverageRecord, Recorder
from attnmon.capture.below import below_modes
from attnmon.errors import AttnmonError
from attnmon.rules import RuleSet
from attnmon.run.accumulator import Accumulator
from attnmon.run.faults import Faults
from attnmon.run.host_copies import HostCopies
from attnmon.run.options import WatchKeywords, WatchOptions, shows_options
from attnmon.run.ranks import RankMerger, world_size
from attnmon.run.snapshots import ClosedState, make_snapshot
from attnmon.stats.settings import Settings
from attnmon.types import Alert, Snapshot
from attnmon.writers import FanOut

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ALERTS_KEPT = 10_000  # a run that alarms all day must not fill memory


class Monitor:
    """Watches every attention head of a model while it trains. Made by ``attnmon.watch``, which lists the options.

    Outside ``with monitor.step()`` the model carries no hook. Nothing it does changes a loss, a weight, a
    ``state_dict`` key or any random state.
    """

    def __init__(self, model: nn.Module, **options: Unpack[WatchKeywords]) -> None:
        given = WatchOptions(**options)  # type: ignore[arg-type]  # one item becomes a tuple there
        self.every_n_steps = given.every_n_steps
        self.write_every_n_steps = given.write_every_n_steps
        # what the model and torch get to hold must not hold the monitor: once dropped, it lets go of everything
        self._faults = Faults(given.on_error)
        self._on_alert = given.on_alert
        self._settings = given.settings
        self._rules = RuleSet(given.rules)
        self._accumulator = Accumulator(
            given.settings, given.backend, self._faults.call_not_measured, self._faults.warn_once
        )
        self._recorder = Recorder(
            model,
            self._accumulator,
            include=given.include,
            exclude=given.exclude,
            with_hidden=given.tokens == "hidden",
            on_left_alone=self._faults.warn_once,
        )
        weakref.finalize(self, self._recorder.close).atexit = False
        self._writer = FanOut(given.writers, on_error=given.on_error)
        self._written_step: int | None = None
        self._group = given.process_group
        self._merger: RankMerger | None = None
        self._host_copies = HostCopies()
        self._snapshot: Snapshot | None = None
        self._alerts: list[Alert] = []
        self._next_step = 0
        self._steps = 0  # optimizer steps so far, whatever their numbers are
        self._open_step: int | None = None
        self._in_block = False  # the open step ends with its with-block, at the latest
        self._measuring = False
        self._past: ClosedState | None = None  # of a copy
        self._closed = False
        self._rank = 0  # stays known when the process group is gone
        self._note_rank()

    # -- a step ---------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, step: int | None = None) -> Iterator[None]:
        """One optimizer step: any number of micro-batches, forward and backward inside.

        Args:
            step: its number, for the records; by default the steps are counted from 0.
        """
        if self._in_block:
            self._faults.warn_once("a step was begun inside another step; the inner one is ignored")
            yield
            return
        begun = self.begin_step(step)
        self._in_block = begun
        try:
            yield
        except BaseException:
            if begun:
                self.abandon_step()
            raise
        if begun:
            self.end_step()

    def begin_step(self, step: int | None = None) -> bool:
        """First half of ``step()``, for trainers whose steps are not one block of code; whether one was begun.

        A step that is still open was left by a trainer that was interrupted: it is abandoned, and nothing of it is
        mixed with the new one.
        """
        if self._closed:
            return False
        if self._in_block:
            self._faults.warn_once("a step was begun inside another step; the inner one is ignored")
            return False
        if self._open_step is not None:
            self._faults.warn_once("a step was begun while another one was open; the older one is dropped")
            self.abandon_step()
        self._open_step = self._next_step if step is None else int(step)
        self._measuring = self._steps % self.every_n_steps == 0
        self._faults.refused_calls = False
        if self._measuring:
            self._faults.guard(self._accumulator.begin)
            self.resume()
        return True

    def pause(self) -> None:
        """Stop watching until ``resume``, for instance between micro-batches, where validation may run."""
        if self._past is not None:
            return
        self._faults.guard(self._recorder.stop)

    def resume(self) -> None:
        """Watch again, if the open step is a measured one."""
        if self._measuring and not self._closed:
            self._faults.guard(self._recorder.start)

    def abandon_step(self) -> None:
        """The step will not be finished; what it has shown is dropped."""
        if self._past is not None:
            return
        self._faults.guard(self._recorder.abandon)
        self._open_step, self._measuring, self._in_block = None, False, False
        self._faults.guard(self._accumulator.take)

    def end_step(self, *, collective: bool = False) -> None:
        """Second half of ``step()``.

        Args:
            collective: merge over ranks now (every rank does the same, as under a Lightning strategy); otherwise
                a merge waits for ``flush``.
        """
        if self._open_step is None:
            return
        self.pause()
        step, self._open_step, self._in_block = self._open_step, None, False
        self._next_step = step + 1
        self._steps += 1
        if self._measuring:
            self._measuring = False
            self._faults.guard(lambda: self._finish(step, collective))

    def _finish(self, step: int, collective: bool) -> None:
        calls = self._accumulator.calls
        self._recorder.end_step(calls)
        matrices = self._accumulator.take()
        ranks = world_size(self._group)
        self._collect(wait=ranks > 1)
        if ranks == 1:
            if matrices:
                with below_modes():
                    self._host_copies.put(step, matrices)
            self._collect(wait=False)
        elif collective:
            self._merge_ranks(step, matrices)
        else:
            self._host_copies.hold(step, matrices)
        if not calls and not self._faults.refused_calls:  # after the collective, since a warning may be an exception
            self._faults.warn_once(
                "a measured step captured no attention call; monitor.coverage() says which modules were expected"
            )

    def _merge_ranks(self, step: int, matrices: dict[str, torch.Tensor]) -> None:
        if self._merger is None:
            self._merger = RankMerger(self._accumulator.packing, self._group)
        with below_modes():
            step, merged = self._merger.merge(step, matrices)
        if merged:
            self._publish(step, merged)

    def _collect(self, *, wait: bool) -> None:
        with below_modes():
            arrived = list(self._host_copies.ready(wait=wait))
        for step, matrices in arrived:
            self._publish(step, matrices)

    def _publish(self, step: int, matrices: dict[str, NDArray[np.float64]]) -> None:
        paths = self._recorder.in_order(matrices)
        snapshot = make_snapshot(step, paths, matrices, self._accumulator.packing, self._settings)
        before = step - self.every_n_steps
        if self._snapshot is not None:
            before = min(before, self._snapshot.step)
        is_due = (step + 1) // self.write_every_n_steps > (before + 1) // self.write_every_n_steps
        self._snapshot = snapshot
        alerts = self._rules.update(snapshot)
        self._alerts.extend(alerts)
        del self._alerts[:-_ALERTS_KEPT]
        if self._writes_here():
            if is_due:
                self._write(snapshot)
            if alerts:
                self._writer.write_alerts(alerts)
        if self._on_alert is not None:
            for alert in alerts:
                self._on_alert(alert)

    def _write(self, snapshot: Snapshot) -> None:
        self._writer.write_snapshot(snapshot)
        self._written_step = snapshot.step

    # -- results --------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Snapshot | None:
        """The newest finished step; never waits for the device."""
        if self._past is None and world_size(self._group) == 1:
            self._faults.guard(lambda: self._collect(wait=False))
        return self._snapshot

    def flush(self) -> Snapshot | None:
        """Wait for what is on its way and return the newest snapshot.

        Under ``torch.distributed`` with more than one rank this is a collective: every rank has to call it, after
        the same step, and nothing is published before. It merges the newest finished step over ranks.
        """
        if not self._closed:
            self._faults.guard(self._flush)
        return self._snapshot

    def _flush(self) -> None:
        self._collect(wait=True)
        if world_size(self._group) > 1:
            self._merge_ranks(*(self._host_copies.held() or (-1, {})))  # a rank without a step enters all the same
        if self._writes_here():
            self._writer.flush()

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far, oldest first (the newest 10,000)."""
        return list(self._alerts)

    @property
    def settings(self) -> Settings:
        """The validated options that the numbers depend on."""
        return self._settings

    def coverage(self) -> list[CoverageRecord]:
        """One record for each attention module: captured, waiting, or skipped and why."""
        if self._past is not None:
            return list(self._past.coverage)
        return self._recorder.coverage()

    # -- life -----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Detach and close the writers; may be called more than once."""
        if self._closed:
            return
        if self._open_step is not None:
            self.abandon_step()
        if world_size(self._group) == 1:
            self._faults.guard(lambda: self._collect(wait=True))
        elif self._snapshot is None and self._host_copies.held() is not None:
            self._faults.warn_once("nothing was published: with several ranks, every rank has to call monitor.flush()")
        self._closed = True
        self._faults.guard(self._recorder.close)
        if self._writes_here():
            last = self._snapshot
            if last is not None and last.step != self._written_step:
                self._faults.guard(lambda: self._write(last))  # a run ends between two writes; its last state matters
            self._faults.guard(self._writer.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Baselines, open alerts and the step count; plain containers, numbers and strings."""
        if self._past is not None:
            return copy.deepcopy(self._past.state)
        self._faults.guard(lambda: self._collect(wait=True))
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "version": 1,
            "next_step": self._next_step,
            "steps": self._steps,
            "next_draw": self._accumulator.next_draw,
            "rules": self._rules.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` left off.

        Raises:
            AttnmonError: not a state of this library's version.
        """
        if not isinstance(state, dict) or state.get("version") != 1:
            raise AttnmonError("state must be what Monitor.state_dict() returned, version 1")
        next_step, next_draw = state.get("next_step"), state.get("next_draw")
        if not isinstance(next_step, int) or not isinstance(next_draw, int):
            raise AttnmonError("state must be what Monitor.state_dict() returned; it lacks next_step or next_draw")
        if self._past is not None:
            raise AttnmonError("this monitor is a closed copy; load the state into one made by attnmon.watch")
        steps = state.get("steps", next_step)  # older states have steps without gaps
        if not isinstance(steps, int):
            raise AttnmonError("state must be what Monitor.state_dict() returned; its steps are no number")
        self._rules.load_state_dict(state.get("rules", {}))  # changes nothing if it raises
        self._next_step, self._steps, self._accumulator.next_draw = next_step, steps, next_draw

    # A copy, pickled or not, is what the monitor had seen by then: closed, and without model, writers and rules.

    def __reduce__(self) -> tuple[Any, ...]:
        return (_copied, (self._past or self._closed_state(),))

    def _closed_state(self) -> ClosedState:
        return ClosedState(
            self._snapshot,
            self.alerts,
            self.coverage(),
            self._state(),
            self.settings,
            self.every_n_steps,
            self.write_every_n_steps,
        )

    # -- ranks -------------------------------------------------------------------------------------------------

    def _writes_here(self) -> bool:
        self._note_rank()
        return self._rank == 0

    def _note_rank(self) -> None:
        if world_size(self._group) > 1:
            self._rank = torch.distributed.get_rank(self._group)


def _copied(past: ClosedState) -> Monitor:
    """A closed monitor that tells what another had seen."""
    monitor = Monitor.__new__(Monitor)
    monitor._past, monitor._closed = past, True
    monitor._snapshot, monitor._alerts, monitor._settings = past.snapshot, list(past.alerts), past.settings
    monitor.every_n_steps, monitor.write_every_n_steps = past.every_n_steps, past.write_every_n_steps
    monitor._open_step, monitor._measuring, monitor._in_block = None, False, False
    monitor._faults = Faults("warn")
    return monitor


@shows_options()
def watch(model: nn.Module, **options: Unpack[WatchKeywords]) -> Monitor:
    """Watch every attention module of ``model``.

    Args:
        model: any module; wrappers (DDP, compiled, ...) do not matter.
        every_n_steps: measure each n-th optimizer step, the first one included, whatever numbers the steps are given.
        rows: query positions per sampled sequence and head; None for every row.
        sequences: sampled sequences per call; None for all.
        top_n: N, size of the selected set of separability, distance and top_mass.
        tokens: geometry of separability and distance: "value" (value vectors of unit length), "value_raw" or
            "hidden" (the hidden states that enter the module, of unit length).
        fd_epsilon: step of ``jacobian_fd``.
        metrics: names from ``attnmon.metrics``; None for all.
        include, exclude: glob patterns on module paths, such as ``"*.layers.1?.*"``.
        rules: alert rules; None for the five default ones, () for none.
        writers: where snapshots and alerts go.
        on_alert: called with each ``Alert``, on every rank.
        backend: "auto", "torch" or "triton".
        on_error: "warn": a fault in the monitor is reported once and never stops training; "raise": for debugging.
        write_every_n_steps: snapshots go to the writers each n-th optimizer step; alerts at once.
        process_group: ranks to merge over in ``flush``; None for the default group.

    Returns:
        A ``Monitor``; wrap each optimizer step in ``with monitor.step():``.

    Raises:
        AttnmonError: an option is wrong, or the model has no attention.
    """
    return Monitor(model, **options)
