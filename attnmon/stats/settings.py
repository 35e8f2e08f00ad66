"""The options that the numbers depend on, validated once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from attnmon.checks import check_choice, check_number, check_whole
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
    def create(cls, *, metrics: Iterable[str] | str | None = None, **options: Any) -> Settings:
        """Validate a user's options.

        Args:
            metrics: names of ``attnmon.metrics``, one name, or None for all.
            options: the other attributes by name; one that is left out has its default.

        Raises:
            AttnmonError: says which option, what came and what is accepted.
        """
        given = cls(resolve_metrics(metrics), **options)
        check_whole("rows", given.rows, none_means="every row")
        check_whole("sequences", given.sequences, none_means="all sequences")
        check_whole("top_n", given.top_n)
        check_choice("tokens", given.tokens, TOKENS)
        check_number("fd_epsilon", given.fd_epsilon)
        # numbers of numpy would not go into JSON
        return replace(
            given,
            rows=None if given.rows is None else int(given.rows),
            sequences=None if given.sequences is None else int(given.sequences),
            top_n=int(given.top_n),
            fd_epsilon=float(given.fd_epsilon),
        )

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
        """The options but for ``metrics``, JSON-ready, as every snapshot stores them."""
        return {
            "rows": self.rows,
            "sequences": self.sequences,
            "top_n": self.top_n,
            "tokens": self.tokens,
            "fd_epsilon": self.fd_epsilon,
        }


DEFAULTS = Settings(metrics=resolve_metrics(None))
"""Every metric, and the defaults of a monitor."""
