"""The choices that the numbers depend on, validated once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attnmon.errors import AttnmonError
from attnmon.metrics import METRICS, resolve_metrics

TOKENS = ("value", "value_raw", "hidden")
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
    rows: int | None = 32
    sequences: int | None = 4
    top_n: int = 16
    tokens: str = "value"
    fd_epsilon: float = 0.1

    @classmethod
    def create(
        cls,
        *,
        metrics: Iterable[str] | str | None = None,
        rows: int | None = 32,
        sequences: int | None = 4,
        top_n: int = 16,
        tokens: str = "value",
        fd_epsilon: float = 0.1,
    ) -> Settings:
        """Validate a user's options.

        Raises:
            AttnmonError: says which option, what came and what is accepted.
        """
        check_count("rows", rows, none_means="every row")
        check_count("sequences", sequences, none_means="all sequences")
        check_count("top_n", top_n)
        if tokens not in TOKENS:
            raise AttnmonError(f"tokens must be one of {', '.join(map(repr, TOKENS))}; got {tokens!r}")
        if isinstance(fd_epsilon, bool) or not isinstance(fd_epsilon, (int, float)):
            raise AttnmonError(f"fd_epsilon must be a positive number; got {fd_epsilon!r}")
        if not (math.isfinite(fd_epsilon) and fd_epsilon > 0):
            raise AttnmonError(f"fd_epsilon must be a positive finite number; got {fd_epsilon!r}")
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


def check_count(name: str, value: object, *, none_means: str | None = None) -> None:
    """Raise AttnmonError unless ``value`` is an int >= 1 (or None, where that has a meaning)."""
    if value is None and none_means is not None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = f" or None ({none_means})" if none_means else ""
        raise AttnmonError(f"{name} must be a positive integer{also}; got {value!r}")
