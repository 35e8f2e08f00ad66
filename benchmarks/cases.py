"""What is measured: sizes as data. A new size is a new line here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverheadCase:
    """One GPT-2-shaped training step; ``batch`` is chosen so that it takes one to a few seconds on two CPU cores.

    Batches are small on purpose: with more sequences than the monitor samples (4) its share of the step only falls.
    """

    layers: int
    dim: int
    heads: int
    length: int
    batch: int
    vocab: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.heads}-d{self.dim}-L{self.length}"


OVERHEAD = (
    OverheadCase(layers=4, dim=512, heads=8, length=256, batch=4, vocab=256),
    OverheadCase(layers=4, dim=512, heads=8, length=512, batch=4, vocab=256),
    OverheadCase(layers=4, dim=512, heads=8, length=1024, batch=2, vocab=256),
    OverheadCase(layers=6, dim=512, heads=8, length=512, batch=4, vocab=50257),
    OverheadCase(layers=12, dim=768, heads=12, length=256, batch=4, vocab=50257),
    OverheadCase(layers=12, dim=768, heads=12, length=512, batch=4, vocab=50257),
    OverheadCase(layers=12, dim=768, heads=12, length=1024, batch=2, vocab=50257),
)

OVERHEAD_QUICK = (OverheadCase(layers=2, dim=64, heads=4, length=128, batch=4, vocab=256),)


@dataclass(frozen=True)
class SamplingCase:
    """Attention whose sampled statistics are compared with those of all rows.

    kind: "trained" is a GPT-2-shaped model after ``train_steps`` steps on English bytes; "synthetic" is one layer of
    given q, k, v whose heads' logits spread from ``sigmas[0]`` to ``sigmas[1]`` (geometric), with a first key that
    draws attention in every other head, as in trained models.
    """

    kind: str
    layers: int
    dim: int
    heads: int
    length: int
    batch: int
    train_steps: int = 0
    sigmas: tuple[float, float] = (0.0, 0.0)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layers}x{self.heads}-L{self.length}"


SAMPLING = (
    SamplingCase("trained", layers=4, dim=128, heads=4, length=256, batch=8, train_steps=150),
    SamplingCase("synthetic", layers=1, dim=768, heads=12, length=512, batch=8, sigmas=(0.3, 12.0)),
)

PAPER = ("distance-length", "distance-topn", "critical-n", "separability", "sensitivity", "together")
"""The paper's five experiments, each alone, and all of them on the same forwards."""

SAMPLING_QUICK = (SamplingCase("synthetic", layers=1, dim=64, heads=4, length=128, batch=8, sigmas=(0.3, 12.0)),)
