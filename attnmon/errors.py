"""The exceptions and the warning of attnmon."""

from __future__ import annotations


class AttnmonError(ValueError):
    """A mistake of the caller, such as an option out of range. The message says what was expected and what came."""


class UnsupportedAttention(AttnmonError):
    """An attention call that cannot be measured correctly, for instance because of one of its arguments."""


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message names the pip extra that installs it.

    Attributes:
        package: name of the missing package.
        extra: name of attnmon's extra that installs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'attnmon[{extra}]'"
        )
        self.package = package
        self.extra = extra


class AttnmonWarning(UserWarning):
    """The monitor skipped something or failed internally; training is not affected."""
