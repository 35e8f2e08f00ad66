"""The Lightning callback: a thin adapter onto the monitor, for ``pytorch_lightning`` and ``lightning.pytorch``."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
import warnings
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

from attnmon.capture import CoverageRecord, coverage_table
from attnmon.checks import check_whole
from attnmon.errors import AttnmonError, AttnmonWarning, MissingExtra
from attnmon.run.monitor import Monitor
from attnmon.run.options import DEFAULTS, CallbackKeywords, WatchOptions, shows_options
from attnmon.types import Alert, Snapshot
from attnmon.writers import ConsoleWriter, JsonlWriter, TensorBoardWriter, Writer
from attnmon.writers.logger import LoggerWriter

__all__ = ["AttentionMonitor"]

# the options that a monitor's numbers and alerts depend on
_IN_STATE_KEY = (
    "every_n_steps", "rows", "sequences", "top_n", "tokens", "fd_epsilon", "metrics", "include", "exclude", "rules"
)  # fmt: skip


def _callback_bases() -> tuple[type, ...]:
    """The Callback classes of whichever of the two packages is installed: they are not each other's kin."""
    found = [
        importlib.import_module(name).Callback
        for name in ("pytorch_lightning", "lightning.pytorch")
        if importlib.util.find_spec(name.split(".")[0]) is not None
    ]
    if not found:
        raise MissingExtra("pytorch_lightning", "lightning", "attnmon.lightning")
    return tuple(dict.fromkeys(found))


if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Base:
        """Stands in for the Callback class, which is chosen at import."""

else:
    _Base = type("_Base", _callback_bases(), {"__doc__": "Callback of every Lightning package that is installed."})


class AttentionMonitor(_Base):
    """Watches every attention module while a Trainer fits.

    Every optimizer step is measured by default (``every_n_steps=1``), its micro-batches merged; nothing is measured
    in sanity check, validation, test or prediction. Scalars go to every logger of the trainer, pictures and tables to
    those that can show them, at the step of the trainer's own logs; alerts also go to the console. Without a logger
    records go to ``attnmon.jsonl`` in the trainer's root directory. Over data-parallel ranks the numbers are merged
    exactly by one collective per measured step, and rank 0 writes. A checkpoint carries baselines and open alerts.

    One Trainer may have several, if they differ in an option that the numbers or the alerts depend on: it is part of
    the key under which a checkpoint keeps their states. A Trainer's only monitor also takes up a state that was saved
    under other options.

    Tags:

    - ``attnmon/<metric>/mean``, ``/min``, ``/max``: scalars over all heads, in every logger, for each measured metric
      of ``attnmon.metrics.METRICS``, in its unit: ``entropy`` (nats), ``entropy_norm``, ``max_logit`` (logits),
      ``max_logit_uncapped`` (logits), ``logit_std`` (logits), ``effective_temperature``, ``max_prob``, ``top_mass``,
      ``first_mass``, ``sink_mass``, ``separability``, ``jacobian``, ``jacobian_max``, ``jacobian_fd``, ``distance``
    - ``attnmon/rows/total``, ``attnmon/excluded/total``, ``attnmon/excluded/<reason>``: scalars, query positions
      that entered the numbers, and those left out (``padding``, ``masked``, ``nonfinite``)
    - ``attnmon/heads/<metric>``: a picture of the newest step, layers down, heads across
    - ``attnmon/alerts``: a table of the newest alerts (text)
    - ``attnmon/legend``: what each metric is (text, once; TensorBoard only)

    Example:
        >>> from pytorch_lightning import Trainer
        >>> from attnmon.lightning import AttentionMonitor
        >>> monitor = AttentionMonitor(rows=64, metrics=["entropy_norm", "max_logit", "effective_temperature"])
        >>> trainer = Trainer(callbacks=[monitor])  # trainer.fit(model), then monitor.latest, monitor.alerts

    Args:
        log_every_n_steps: optimizer steps between two snapshots that are written; None for the trainer's own setting.
        writers: further writers, besides those for the trainer's loggers.
        options: all others that ``attnmon.watch`` takes, and describes.

    Raises:
        AttnmonError: an option is wrong (at construction); the model has no attention (when fitting starts).
        MissingExtra: no Lightning package is installed.
    """

    @shows_options("write_every_n_steps")
    def __init__(
        self,
        *,
        log_every_n_steps: int | None = None,
        writers: Iterable[Writer] | Writer = (),
        **options: Unpack[CallbackKeywords],
    ) -> None:
        super().__init__()
        check_whole("log_every_n_steps", log_every_n_steps, none_means="the trainer's own")
        if "write_every_n_steps" in options:
            raise AttnmonError("write_every_n_steps is called log_every_n_steps in this callback")
        accepted = {"log_every_n_steps", *DEFAULTS} - {"write_every_n_steps"}
        unknown = ", ".join(repr(name) for name in options if name not in accepted)
        if unknown:
            raise AttnmonError(f"unknown option {unknown}; accepted are: {', '.join(sorted(accepted))}")
        checked = WatchOptions(writers=writers, **options)  # type: ignore[arg-type]  # made a tuple there
        self._writers = checked.writers
        # what runs once is kept: a second fit needs it again
        self._options = {name: getattr(checked, name) for name in options}
        self._log_every_n_steps = log_every_n_steps
        self._monitor: Monitor | None = None
        self._model: weakref.ref[Any] | None = None
        self._restored: dict[str, Any] | None = None
        self._steps_before = 0
        self._told = False
        self._is_open = False

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: the class, and the options that tell it from another."""
        given = {name: self._options.get(name, DEFAULTS[name]) for name in _IN_STATE_KEY}
        chosen = {name: option for name, option in given.items() if option != DEFAULTS[name]}
        return type(self).__qualname__ + (repr(chosen) if chosen else "")

    @property
    def monitor(self) -> Monitor:
        """The monitor at work.

        Raises:
            AttnmonError: fitting has not started.
        """
        if self._monitor is None:
            raise AttnmonError("there is no monitor before fitting starts")
        return self._monitor

    @property
    def latest(self) -> Snapshot | None:
        """The newest finished step; None before there is one."""
        return None if self._monitor is None else self._monitor.latest

    @property
    def alerts(self) -> list[Alert]:
        """All alerts so far, oldest first."""
        return [] if self._monitor is None else self._monitor.alerts

    def coverage(self) -> list[CoverageRecord]:
        """One record for each attention module; empty before fitting starts."""
        return [] if self._monitor is None else self._monitor.coverage()

    # -- Lightning's hooks ----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: a monitor for this fit, which goes on where an earlier fit of the same model left off."""
        if self._restored is None and self._monitor is not None and self._is_model(pl_module):
            self._restored = self._monitor.state_dict()
        self._drop_monitor()
        every = self._log_every_n_steps or trainer.log_every_n_steps or sys.maxsize  # the trainer's 0 is "never"
        writers = [*self._writers, *_writers_for(trainer)] if trainer.is_global_zero else []
        self._monitor = Monitor(pl_module, writers=writers, write_every_n_steps=every, **self._options)
        self._model = weakref.ref(pl_module)
        self._is_open = self._told = False
        self._restore()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch begins, and with it perhaps a step."""
        if self._monitor is None:
            return
        if self._is_open:
            self._monitor.resume()
            return
        self._is_open = True
        self._steps_before = trainer.global_step
        self._monitor.begin_step(_logged_step(trainer))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Forward and backward are done: what other callbacks run from here on is not training."""
        if self._monitor is not None and pl_module.automatic_optimization:
            self._monitor.pause()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """A training step without a loss has no backward: what runs from here on is not training."""
        self.on_after_backward(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch ends, and with it the step if the optimizer has moved."""
        if self._monitor is None or not self._is_open:
            return
        self._monitor.pause()
        if trainer.global_step != self._steps_before:
            self._is_open = False
            self._monitor.end_step(collective=True)
            self._tell_coverage(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An epoch may end inside a micro-batch (a hook returned -1), and validation may follow."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over: write what is still on its way."""
        self._finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Fit was interrupted: leave the model as it was. No collective here, other ranks may be gone."""
        self._finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach, whatever happened."""
        if stage == "fit":
            self._finish()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint carries: baselines, open alerts, the step count."""
        if self._monitor is None or self._restored is not None:
            return self._restored or {}
        return self._monitor.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Where it can only be meant for this monitor, take up a state that was saved under another key.

        The key depends on options, which may have changed since; in checkpoints of older versions it did not.
        """
        states = checkpoint.get("callbacks") or {}
        monitors = sum(isinstance(callback, AttentionMonitor) for callback in trainer.callbacks)
        if self.state_key in states or monitors != 1:
            return
        name = type(self).__qualname__
        keys = [key for key in states if key == name or str(key).startswith(f"{name}{{")]
        if len(keys) == 1:
            self.load_state_dict(copy.deepcopy(states[keys[0]]))

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, pickled or not: before fitting all that was asked for, afterwards what had been seen."""
        # the trainer lends a callback methods of its model, with which a copy would take the model along
        state = {name: value for name, value in self.__dict__.items() if not isinstance(value, MethodType)}
        state["_model"] = None
        if self._monitor is not None:  # files and functions that its own run goes on with
            state["_writers"] = ()
            state["_options"] = {name: given for name, given in self._options.items() if name != "on_alert"}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint; one of another version is left aside with a warning."""
        self._restored = state_dict or None
        if self._monitor is not None and not self._monitor.closed:
            self._restore()

    # -- inside ---------------------------------------------------------------------------------------------

    def _tell_coverage(self, trainer: Any) -> None:
        """After the first measured step: what is watched, and what is not and why."""
        if self._told or not trainer.is_global_zero:
            return
        records = self.coverage()
        if any(record.status != "waiting" for record in records):
            self._told = True
            ConsoleWriter().write_text(f"[attnmon] attention modules:\n{coverage_table(records)}")

    def _is_model(self, pl_module: Any) -> bool:
        return self._model is not None and self._model() is pl_module

    def _restore(self) -> None:
        state, self._restored = self._restored, None
        if state is None or self._monitor is None:
            return
        try:
            self._monitor.load_state_dict(state)
        except Exception as error:  # a run must not fail to resume because of its monitor
            warnings.warn(
                f"attnmon: the checkpoint's baselines are not used ({error}); the monitor starts afresh",
                AttnmonWarning,
                stacklevel=2,
            )

    def _finish(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self._is_open = False

    def _drop_monitor(self) -> None:
        self._finish()
        self._monitor = None


def _logged_step(trainer: Any) -> int:
    """The number under which Lightning logs this step's loss: optimizer steps done, whatever the optimizers.

    ``global_step`` counts each of several optimizers; the loop's own counter is what loggers get. This is the one
    place that reads a private attribute of the trainer.
    """
    loop = getattr(getattr(trainer, "fit_loop", None), "epoch_loop", None)
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))


def _writers_for(trainer: Any) -> list[Writer]:
    """Writers for the trainer's loggers, and the console for alerts."""
    writers: list[Writer] = [ConsoleWriter()]
    for logger in trainer.loggers:
        if type(logger).__name__ == "DummyLogger":  # fast_dev_run
            continue
        experiment = getattr(logger, "experiment", None)
        if all(callable(getattr(experiment, name, None)) for name in ("add_scalar", "add_image", "add_text")):
            writers.append(_tensorboard_writer(experiment, logger))
        else:
            writers.append(LoggerWriter(logger))
    if len(writers) == 1 and not getattr(trainer, "fast_dev_run", False):
        writers.append(JsonlWriter(os.path.join(trainer.default_root_dir, "attnmon.jsonl")))
    return writers


def _tensorboard_writer(experiment: Any, logger: Any) -> Writer:
    try:
        return TensorBoardWriter(summary_writer=experiment)
    except MissingExtra as error:
        warnings.warn(f"attnmon: pictures are left out: {error}", AttnmonWarning, stacklevel=2)
        try:
            return TensorBoardWriter(summary_writer=experiment, images_every=None)
        except MissingExtra:
            return LoggerWriter(logger)
