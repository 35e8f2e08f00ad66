"""What ``attnmon paper`` can be asked for, and what is refused before anything is computed or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnmon.checks import check_number, check_whole
from attnmon.errors import AttnmonError

EXPERIMENTS = ("distance-length", "distance-topn", "critical-n", "separability", "sensitivity", "normalizers")
"""The five of the paper (arXiv 2508.17821, Algorithms 1 to 5), then other normalizers on the same logits."""

LENGTHS = (32, 64, 128, 256, 512, 1024)
TOP_N = (1, 5, 10, 20, 100)
EPSILONS = (1e-3, 0.1, 10.0)
TEMPERATURES = tuple(10 ** (quarter / 4) for quarter in range(-12, 5))
"""T of experiment 5, 0.001 to 10; 1 is standard scaled attention."""

CANDIDATES = tuple(sorted({round(2 ** (eighth / 4)) for eighth in range(37)}))
"""N of experiment 3, four an octave from 1 to 512; of a length L those up to L / 2 are tried."""

OVER_LENGTHS = ("distance-length", "critical-n")
"""Experiments that run at every length; the others run at the longest."""


@dataclass(frozen=True)
class PaperOptions:
    """What ``attnmon paper --help`` offers; the defaults are the paper's settings (definitions, section 5).

    Attributes:
        text: what the model reads, as bytes.
        text_name: how the text is called on the page.
        out: folder of results.
        model: folder or name of a transformers model; None trains a small one.
        experiments: of ``EXPERIMENTS``.
        lengths: L, ascending; a chunk's first L tokens are read.
        top_n: N of the experiments at the longest length.
        length_top_n: N of the experiment over lengths.
        chunks: consecutive pieces of the longest length that are read; averages run over all their rows.
        draws: random sets a row for the expected distance.
        tokens: geometry: "value" (unit length), "value_raw" or "hidden" (unit length).
        level: significance level of the Kolmogorov-Smirnov test.
        seed: of the random sets and of the small model's training.
        device: where the model and the arithmetic run.
        train_steps: optimizer steps of the small model.
        restart: put aside what an earlier run with other settings left in ``out``.

    Raises:
        AttnmonError: a choice is out of range, or N >= L.

    Source: paper, experiments 1 to 5, for lengths, N, steps and temperatures; the level is that of its text (0.01), not
    of its Algorithm 3 (0.05). The other defaults are ours.
    """

    text: bytes
    text_name: str
    out: Path
    model: str | None = None
    experiments: tuple[str, ...] = EXPERIMENTS
    lengths: tuple[int, ...] = LENGTHS
    top_n: tuple[int, ...] = TOP_N
    length_top_n: int = 5
    chunks: int = 4
    draws: int = 4
    tokens: str = "value"
    level: float = 0.01
    seed: int = 0
    device: str = "cpu"
    train_steps: int = 400
    restart: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.experiments if name not in EXPERIMENTS]
        if unknown or not self.experiments:
            raise AttnmonError(
                f"unknown experiment {', '.join(unknown) or '(none)'}; there are: {', '.join(EXPERIMENTS)}"
            )
        for name, values, least in (("--lengths", self.lengths, 2), ("--top-n", self.top_n, 1)):
            if not values or list(values) != sorted(set(values)) or values[0] < least:
                raise AttnmonError(
                    f"{name} must be different whole numbers of at least {least}, ascending; "
                    f"got {' '.join(map(str, values))}"
                )
        check_whole("--chunks", self.chunks)
        check_whole("--draws", self.draws, least=2)  # one says nothing of its own error
        check_whole("--length-n", self.length_top_n)
        check_number("--level", self.level, below=1.0)
        longest, shortest = self.lengths[-1], self.lengths[0]
        at_longest = {"distance-topn", "separability"} & set(self.experiments)
        if at_longest and self.top_n[-1] >= longest:
            raise AttnmonError(
                f"N must be smaller than L: --top-n has {self.top_n[-1]}, the longest of --lengths is {longest}"
            )
        if "distance-length" in self.experiments and self.length_top_n >= shortest:
            raise AttnmonError(
                f"N must be smaller than L: --length-n is {self.length_top_n}, the shortest of --lengths is {shortest}"
            )

    @property
    def longest(self) -> int:
        """The longest length, which is that of a chunk."""
        return self.lengths[-1]

    @property
    def tokens_needed(self) -> int:
        """The number of tokens that the chunks take of the text."""
        return self.chunks * self.longest

    def lengths_of(self, experiment: str) -> tuple[int, ...]:
        """Give the lengths at which an experiment of ``EXPERIMENTS`` runs."""
        return self.lengths if experiment in OVER_LENGTHS else (self.longest,)


def candidates(length: int) -> tuple[int, ...]:
    """Give the N that experiment 3 tries at a length, ascending; at least one.

    Args:
        length: L.

    Returns:
        Those of ``CANDIDATES`` up to L / 2, or 1 alone.

    Source: ours; the paper's Algorithm 3 goes through a list of N.
    """
    return tuple(n for n in CANDIDATES if n <= length // 2) or (1,)
