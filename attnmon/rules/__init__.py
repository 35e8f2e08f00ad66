"""Alert rules: from snapshots to alerts, with patience, hysteresis and the head's own baseline.

The rules need numpy and the standard library only.
"""

from attnmon.rules.base import Rule
from attnmon.rules.limits import Ceiling, LowTemperature
from attnmon.rules.nonfinite import NonFinite
from attnmon.rules.relative import Growth, Uniform
from attnmon.rules.ruleset import RuleSet, default_rules

__all__ = [
    "Ceiling",
    "Growth",
    "LowTemperature",
    "NonFinite",
    "Rule",
    "RuleSet",
    "Uniform",
    "default_rules",
]
