"""Writers: where snapshots and alerts go. Importing this package imports neither tensorboard nor Pillow."""

from attnmon.writers.base import Writer
from attnmon.writers.console import ConsoleWriter, heads_table
from attnmon.writers.fanout import FanOut
from attnmon.writers.heatmap import heads_png, render_heads
from attnmon.writers.jsonl import JsonlWriter, read_jsonl
from attnmon.writers.tensorboard import TensorBoardWriter

__all__ = [
    "ConsoleWriter",
    "FanOut",
    "JsonlWriter",
    "TensorBoardWriter",
    "Writer",
    "heads_png",
    "heads_table",
    "read_jsonl",
    "render_heads",
]
