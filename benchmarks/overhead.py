"""What a training step costs with the monitor off, on, attached but not measuring, and with the eager way."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnmon
from attnmon.capture.recorder import Recorder
from attnmon.capture.reporter import Reporter
from attnmon.run.accumulator import Accumulator
from attnmon.tiny_gpt2 import tiny_gpt2
from benchmarks.cases import OverheadCase

VARIANTS = ("off", "on", "idle", "eager")
PEERS = ("module-monitor", "probe", "compiled", "compiled-on")
"""off: the bare step. on: ``attnmon.watch`` with its defaults, every step. idle: the same with
``every_n_steps=1000``, steps that are not measured. eager: ``attn_implementation="eager"``,
``output_attentions=True`` and the mean entropy of each head from the returned weights, in float32.

Of the peers, module-monitor: torch-module-monitor's attention monitor, every step. probe: 128 rows x L scores of
every sequence and head, softmax and entropy. compiled, compiled-on: the bare and the watched model,
compiled.

The column "inside" is the time spent in the monitor's own code (``Inside``) over the rest of the watched step."""


def build(case: OverheadCase, variants: Sequence[str] = VARIANTS) -> dict[str, nn.Module]:
    """A model for each variant ("off" among them), all with the same weights."""
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {}
    for variant in variants:
        models[variant] = tiny_gpt2(
            layers=case.layers,
            heads=case.heads,
            width=case.dim,
            length=case.length,
            vocabulary=case.vocab,
            attention="eager" if variant == "eager" else "sdpa",
        )
        models[variant].load_state_dict(models["off"].state_dict())
    return models


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Next-token cross entropy."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def entropies(attentions: tuple[Tensor, ...]) -> list[Tensor]:
    """Mean entropy of each head of each layer from the weights a model returned: [heads] a layer."""
    found = []
    for weights in attentions:
        p = weights.float()
        found.append(-(p * p.clamp_min(1e-12).log()).sum(-1).mean((0, 2)))
    return found


class Inside:
    """Seconds spent in a monitor's own code: its hooks, describing and reducing calls, beginning and ending a step.

    A difference of two step times shows no more than a few per cent on a machine that does other things; this shows
    a part of it alone, but to a tenth of a per cent.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0  # a part may call another

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time added here."""

        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return call


@contextlib.contextmanager
def inside_of_monitors() -> Iterator[Inside]:
    """Time what every monitor does meanwhile."""
    inside = Inside()
    parts = (
        (Accumulator, "observe"), (Recorder, "enter"), (Recorder, "leave"), (Reporter, "report"),
        (attnmon.Monitor, "begin_step"), (attnmon.Monitor, "end_step"),
    )  # fmt: skip
    before = [getattr(owner, name) for owner, name in parts]
    for (owner, name), function in zip(parts, before, strict=True):
        setattr(owner, name, inside.timed(function))
    try:
        yield inside
    finally:
        for (owner, name), function in zip(parts, before, strict=True):
            setattr(owner, name, function)


def steppers(models: dict[str, nn.Module]) -> tuple[dict[str, Callable[[Tensor], None]], attnmon.Monitor]:
    """A training step for each variant, and the monitor of the one that is watched."""
    optimizers = {variant: torch.optim.AdamW(model.parameters(), lr=1e-4) for variant, model in models.items()}
    monitor = attnmon.watch(models["on"])
    idle_monitor = attnmon.watch(models["idle"], every_n_steps=1000) if "idle" in models else None

    def update(variant: str) -> None:
        optimizers[variant].step()
        optimizers[variant].zero_grad()

    def off(tokens: Tensor) -> None:
        loss_of(models["off"](tokens).logits, tokens).backward()
        update("off")

    def on(tokens: Tensor) -> None:
        with monitor.step():
            loss_of(models["on"](tokens).logits, tokens).backward()
        update("on")

    def idle(tokens: Tensor) -> None:
        assert idle_monitor is not None
        with idle_monitor.step():
            loss_of(models["idle"](tokens).logits, tokens).backward()
        update("idle")

    def eager(tokens: Tensor) -> None:
        output = models["eager"](tokens, output_attentions=True)
        entropies(output.attentions)
        loss_of(output.logits, tokens).backward()
        update("eager")

    steps = {"off": off, "on": on, "idle": idle, "eager": eager, **peer_steppers(models, update)}
    return {variant: steps[variant] for variant in models}, monitor


def peer_steppers(models: dict[str, nn.Module], update: Callable[[str], None]) -> dict[str, Callable[[Tensor], None]]:
    """The training steps of those peers that are among ``models``."""
    from benchmarks import peers

    def stepper(variant: str, forward: Callable[..., Any], bracket: Callable[[int], Any]) -> Callable[[Tensor], None]:
        count = itertools.count()

        def step(tokens: Tensor) -> None:
            with bracket(next(count)):
                loss_of(forward(tokens).logits, tokens).backward()
            update(variant)

        return step

    def nothing(step: int) -> Any:
        return contextlib.nullcontext()

    steps = {}
    for variant in set(PEERS) & set(models):
        model, bracket = models[variant], nothing
        if variant == "module-monitor":
            bracket = peers.watched_by_module_monitor(model)
        elif variant == "probe":
            peers.watched_by_probe(model)
        elif variant == "compiled-on":
            watching = attnmon.watch(model)
            bracket = lambda step, watching=watching: watching.step()  # noqa: E731
        forward = torch.compile(model) if variant.startswith("compiled") else model
        steps[variant] = stepper(variant, forward, bracket)
    return steps


def measure(case: OverheadCase, repeats: int, warmup: int, variants: Sequence[str] = VARIANTS) -> dict[str, Any]:
    """Step times of one case. The variants take turns within a round, and the order turns with the rounds, so that
    whatever else the machine does meets them alike."""
    steps, monitor = steppers(build(case, variants))
    generator = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    shares: list[float] = []
    for round_ in range(warmup + repeats):
        tokens = torch.randint(case.vocab, (case.batch, case.length), generator=generator)
        turn = round_ % len(variants)
        for variant in (*variants[turn:], *variants[:turn]):
            with inside_of_monitors() as inside:
                start = time.perf_counter()
                steps[variant](tokens)
                took = time.perf_counter() - start
            if round_ >= warmup:
                seconds[variant].append(took)
                if variant == "on":
                    shares.append(inside.seconds / (took - inside.seconds))
    snapshot = monitor.flush()
    assert snapshot is not None
    assert len(snapshot.modules) == case.layers, monitor.coverage()
    monitor.close()
    return {
        "name": case.name,
        **vars(case),
        "repeats": repeats,
        "seconds": {variant: quantiles(times) for variant, times in seconds.items()},
        "ratio_to_off": {
            variant: quantiles([one / bare for one, bare in zip(seconds[variant], seconds["off"], strict=True)])
            for variant in variants[1:]
        },
        "inside_share": quantiles(shares),
        "samples": seconds,
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """Median and the 20 and 80 % quantiles."""
    if len(values) == 1:
        return dict.fromkeys(("median", "q20", "q80"), values[0])
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "q20": fifths[0], "q80": fifths[3]}


def columns(variants: Sequence[str]) -> list[str]:
    """Heads of the table."""
    ratios = (f"{name} / off" for name in variants[1:])
    return ["case", "batch", *(f"{name} (s)" for name in variants), *ratios, "inside"]


def row(result: dict[str, Any]) -> list[str]:
    """One line of the table: medians, with the 20 to 80 % range of the ratios of steps of the same round."""
    times = [f"{seconds['median']:.3f}" for seconds in result["seconds"].values()]
    ratios = [
        f"{ratio['median']:.3f} ({ratio['q20']:.3f}-{ratio['q80']:.3f})" for ratio in result["ratio_to_off"].values()
    ]
    inside = f"{100 * result['inside_share']['median']:.2f} %"
    return [result["name"], str(result["batch"]), *times, *ratios, inside]
