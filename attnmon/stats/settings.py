"""The choices that the numbers depend on, validated once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attnmon.checks import check_choice, check_number, check_whole
from attnmon.metrics import METRICS, resolve_metrics

TOKENS = ("value", "value_raw", "hidden")
ROWS, SEQUENCES, TOP_N, FD_EPSILON = 32, 4, 16, 0.1
"""Defaults."""
BACKENDS = ("auto", "torch", "triton")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure and on how many rows.

    Attributes:
        metrics: names in table order.
        rows: query positions per sampled sequence and head; None for every row.
        sequences: sampled sequences per call; None for all.
        top_n: N, size of the selected set.
        tokens: "value" (unit length), "value_raw" or "hidden" (unit length).
        fd_epsilon: step of the finite difference, in units of standard scaled logits.
    """

    metrics: tuple[str, ...]
    rows: int | None = ROWS
    sequences: int | None = SEQUENCES
    top_n: int = TOP_N
    tokens: str = TOKENS[0]
    fd_epsilon: float = FD_EPSILON

    @classmethod
    def create(
        cls,
        *,
        metrics: Iterable[str] | str | None = None,
        rows: int | None = ROWS,
        sequences: int | None = SEQUENCES,
        top_n: int = TOP_N,
        tokens: str = TOKENS[0],
        fd_epsilon: float = FD_EPSILON,
    ) -> Settings:
        """Validate a user's options.

        Raises:
            AttnmonError: says which option, what came and what is accepted.
        """
        check_whole("rows", rows, none_means="every row")
        check_whole("sequences", sequences, none_means="all sequences")
        check_whole("top_n", top_n)
        check_choice("tokens", tokens, TOKENS)
        check_number("fd_epsilon", fd_epsilon)
        return cls(resolve_metrics(metrics), rows, sequences, top_n, tokens, float(fd_epsilon))

    @property
    def needs_tokens(self) -> bool:
        """Whether a requested metric needs value vectors (or hidden states)."""
        return any(METRICS[name].needs == "value" for name in self.metrics)

    @property
    def min_keys(self) -> int:
        """The least n at which a row is valid for at least one requested metric."""
        least = {"any": 1, "pair": 2, "selection": self.top_n + 1}
        return min(least[METRICS[name].valid_rows] for name in self.metrics)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as stored with every snapshot."""
        return {
            "rows": self.rows,
            "sequences": self.sequences,
            "top_n": self.top_n,
            "tokens": self.tokens,
            "fd_epsilon": self.fd_epsilon,
        }
