"""``attnmon demo``: a small GPT-2 learns English text under the monitor, and halfway a fault is planted.

It is also an example to read: the model, the data and the training loop are what a user of Lightning and
transformers would write, and the monitor is one callback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from attnmon.lightning import AttentionMonitor
from attnmon.tiny_gpt2 import tiny_gpt2
from attnmon.types import Alert, Snapshot
from attnmon.writers.console import heads_table

FAULT_TEMPERATURE = 0.04
"""What the fault cuts the effective temperature of each head of a layer to; the alert's limit is 0.1."""


@dataclass(frozen=True)
class DemoOptions:
    """What ``attnmon demo --help`` offers."""

    text: bytes
    steps: int = 400
    layers: int = 4
    heads: int = 4
    dim: int = 128
    length: int = 128
    batch: int = 8
    fault: bool = True
    logdir: Path = Path("runs/attnmon-demo")
    seed: int = 0


class ByteGPT(pl.LightningModule):
    """A GPT-2 that reads and predicts bytes."""

    def __init__(self, options: DemoOptions) -> None:
        super().__init__()
        self.gpt = tiny_gpt2(layers=options.layers, heads=options.heads, width=options.dim, length=options.length)

    def training_step(self, tokens: Tensor, batch_index: int) -> Tensor:
        """Next-byte cross entropy of one batch, [batch, length]."""
        logits = self.gpt(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with a short linear warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class TemperatureFault(pl.Callback):
    """Before step ``at``, sharpens the attention of the middle layer: every head's queries are scaled up until the
    logits that its softmax sees spread 1 / ``temperature`` wide.

    Attributes:
        module: path of the faulted layer, "" before the fault.
    """

    def __init__(self, monitor: AttentionMonitor, at: int, temperature: float) -> None:
        self.monitor = monitor
        self.at = at
        self.temperature = temperature
        self.module = ""

    @torch.no_grad()
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plant the fault when its step has come."""
        snapshot = self.monitor.latest
        if trainer.global_step != self.at or snapshot is None:
            return
        self.module = snapshot.modules[len(snapshot.modules) // 2]
        now = torch.from_numpy(snapshot["effective_temperature"][self.module].copy())
        factors = now / self.temperature  # [heads]
        projection: Any = pl_module.get_submodule(self.module).c_attn  # its output is q, k and v side by side
        dim = projection.weight.shape[0]
        by_column = factors.repeat_interleave(dim // len(factors)).to(projection.weight)
        projection.weight[:, :dim] *= by_column
        projection.bias[:dim] *= by_column


def batches(options: DemoOptions) -> DataLoader[Tensor]:
    """One epoch of ``options.steps`` batches of random windows of the text."""
    text = torch.frombuffer(bytearray(options.text), dtype=torch.uint8).long()
    windows: Any = text.unfold(0, options.length, options.length)  # [windows, length]; a tensor serves as a data set
    sampler = RandomSampler(windows, num_samples=options.steps * options.batch)
    return DataLoader(windows, batch_size=options.batch, sampler=sampler)


def run(options: DemoOptions) -> int:
    """Train, report, and return the exit status: 1 if a planted fault was not found, otherwise 0."""
    with _less_noise():
        pl.seed_everything(options.seed, verbose=False)
        model = ByteGPT(options)
        logger = TensorBoardLogger(options.logdir, name="")
        monitor = AttentionMonitor(log_every_n_steps=10)
        fault = TemperatureFault(monitor, at=options.steps // 2, temperature=FAULT_TEMPERATURE)
        callbacks: list[Any] = [monitor, fault] if options.fault else [monitor]
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=logger,
            log_every_n_steps=10,
            callbacks=callbacks,
            gradient_clip_val=1.0,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        print(
            f"Training a GPT-2 of {options.layers} layers x {options.heads} heads, width {options.dim}, "
            f"on {len(options.text):,} bytes of text for {options.steps} steps"
            + (f"; a fault is planted before step {fault.at}." if options.fault else "."),
            flush=True,
        )
        start = time.perf_counter()
        trainer.fit(model, batches(options))
        print(f"Trained in {time.perf_counter() - start:.0f} s.")
    return report(monitor.latest, monitor.alerts, fault if options.fault else None, Path(logger.log_dir))


def report(snapshot: Snapshot | None, alerts: Sequence[Alert], fault: TemperatureFault | None, logdir: Path) -> int:
    """Print the table of heads, the alerts, the verdict and how to open TensorBoard; return the exit status."""
    status = 0
    if snapshot is not None:
        print(f"\n{heads_table(snapshot)}")
    print(f"\n{describe_alerts(alerts)}")
    if fault is not None:
        hits = [
            alert
            for alert in alerts
            if alert.rule == "low_temperature" and alert.severity != "info" and alert.step >= fault.at
        ]
        elsewhere = sorted({alert.module for alert in hits} - {fault.module})
        here = [alert.step for alert in hits if alert.module == fault.module]
        planted = f"planted in {fault.module} before step {fault.at}"
        if here:
            print(f"\nThe fault was {planted} and found {min(here) - fault.at + 1} steps later.")
        else:
            print(f"\nThe fault was {planted} and NOT found.")
            status = 1
        if elsewhere:
            print(f"The same alert was raised for {', '.join(elsewhere)}, too.")
    print(f"\nOpen the dashboards with:\n  {tensorboard_command(logdir)}")
    return status


def describe_alerts(alerts: Sequence[Alert]) -> str:
    """One paragraph for each rule and layer: since when, which heads, what it means."""
    if not alerts:
        return "No alerts."
    groups: dict[tuple[str, str, str], list[Alert]] = defaultdict(list)
    for alert in alerts:
        groups[alert.rule, alert.severity, alert.module].append(alert)
    lines = [f"{len(alerts)} alert{'s' if len(alerts) > 1 else ''}:"]
    for (rule, severity, module), members in groups.items():
        first = members[0]
        heads = sorted({alert.head for alert in members})
        named = f"head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
        lines.append(f"  {severity} {rule}, {module}, {named}, from step {first.step}")
        lines.append(f"    {first.message}")
    return "\n".join(lines)


def tensorboard_command(logdir: Path) -> str:
    """The command line that shows ``logdir``, with the TensorBoard of this very interpreter."""
    program = Path(sys.executable).parent / "tensorboard"
    if not program.exists():
        return f"{sys.executable} -m tensorboard.main --logdir {logdir}"
    shown = os.path.relpath(program)
    return f"{program if shown.startswith('..') else shown} --logdir {logdir}"


@contextlib.contextmanager
def _less_noise() -> Iterator[None]:
    """Silence the hints that Lightning prints for every small CPU run; attnmon's own warnings stay."""
    # one logger each; which of them speaks depends on the packages that are installed
    names = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")
    levels = {log: log.level for log in map(logging.getLogger, names)}
    with warnings.catch_warnings():
        for hint in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
            warnings.filterwarnings("ignore", message=hint)
        try:
            for log in levels:
                log.setLevel(logging.WARNING)
            yield
        finally:
            for log, level in levels.items():
                log.setLevel(level)
