"""How attention calls are seen without being changed."""

from attnmon.capture.coverage import CoverageRecord, coverage_table
from attnmon.capture.recorder import Recorder

__all__ = ["CoverageRecord", "Recorder", "coverage_table"]
