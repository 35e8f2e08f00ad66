"""Statistics in blocks of rows, by plain torch operations on any device.

Who imports what: code outside ``attnmon.stats`` takes this package's numerics from here, by the names in ``__all__``;
the files of the package import from one another and never from here. ``measure``, the implementation itself, is no
part of ``__all__``: ``attnmon.stats.api`` alone imports it, and only when it is needed. What lies directly in
``attnmon.stats`` (``directions``, ``plan``, ``visibility``) is public under its module's name.
"""

from attnmon.stats.streaming.eigenvalue import EIGENVALUE_CANDIDATES, SecularRoot, scaled_eigenvalue
from attnmon.stats.streaming.finite_step import EXPM1_LIMIT, small_step
from attnmon.stats.streaming.row_inputs import HIDDEN
from attnmon.stats.streaming.top_keys import largest, leading

__all__ = [
    "EIGENVALUE_CANDIDATES",
    "EXPM1_LIMIT",
    "HIDDEN",
    "SecularRoot",
    "largest",
    "leading",
    "scaled_eigenvalue",
    "small_step",
]
