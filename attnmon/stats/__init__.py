"""One attention call in, one number per head and metric out."""

from attnmon.stats.api import attention_stats

__all__ = ["attention_stats"]
