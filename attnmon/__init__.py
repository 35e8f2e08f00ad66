"""attnmon watches the attention of a transformer while it trains.

monitor = attnmon.watch(model)
for batch in batches:
    with monitor.step():
        ...                     # forward, backward, optimizer
monitor.latest["entropy_norm"]  # module path -> one number per head
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnmon.errors import AttnmonError, AttnmonWarning, UnsupportedAttention
    from attnmon.rules import Ceiling, Growth, LowTemperature, NonFinite, Uniform, default_rules
    from attnmon.run import Monitor, watch
    from attnmon.stats import attention_stats
    from attnmon.types import Alert, Snapshot

__version__ = "0.1.0"

__all__ = [
    "Alert",
    "AttnmonError",
    "AttnmonWarning",
    "Ceiling",
    "Growth",
    "LowTemperature",
    "Monitor",
    "NonFinite",
    "Snapshot",
    "Uniform",
    "UnsupportedAttention",
    "attention_stats",
    "default_rules",
    "watch",
]

# Nothing is imported before it is asked for: ``attnmon --help`` needs no torch, whose import takes seconds.
_HOMES = {
    "attnmon.errors": ("AttnmonError", "AttnmonWarning", "UnsupportedAttention"),
    "attnmon.rules": ("Ceiling", "Growth", "LowTemperature", "NonFinite", "Uniform", "default_rules"),
    "attnmon.run": ("Monitor", "watch"),
    "attnmon.stats": ("attention_stats",),
    "attnmon.types": ("Alert", "Snapshot"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("capture", "errors", "metrics", "rules", "run", "stats", "theory", "types", "writers")


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        found = getattr(import_module(_HOME_OF[name]), name)
    elif name in _ROOMS:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
