"""attnmon watches the attention of a transformer while it trains.

monitor = attnmon.watch(model)
for batch in batches:
    with monitor.step():
        ...                     # forward, backward, optimizer
monitor.latest["entropy_norm"]  # module path -> one number per head
"""

from attnmon.errors import AttnmonError, AttnmonWarning, UnsupportedAttention
from attnmon.rules import Ceiling, Growth, LowTemperature, NonFinite, Uniform, default_rules
from attnmon.run.monitor import Monitor, watch
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
