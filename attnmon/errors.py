"""Everything attnmon raises or warns with."""

from __future__ import annotations


class AttnmonError(ValueError):
    """A user's mistake: what was expected, what came, what to do. Raised at construction or attach."""


class UnsupportedAttention(AttnmonError):
    """An attention call, or an argument of one, that cannot be measured without being wrong."""


class MissingExtra(ImportError):
    """An optional dependency is absent; the message names the pip extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'attnmon[{extra}]'"
        )
        self.package = package
        self.extra = extra


class AttnmonWarning(UserWarning):
    """Something was skipped or went wrong inside the monitor; training is not affected."""
