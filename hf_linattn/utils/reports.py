"""The earlier place of `labels`, `machine`, `markdown`, `figures` and `files.write_text`."""

from .figures import error_bars, save_figure
from .files import write_text as write_whole
from .labels import attention_text, checkpoint_name
from .machine import machine, machine_text
from .markdown import interval_text, table

__all__ = [
    "attention_text",
    "checkpoint_name",
    "error_bars",
    "interval_text",
    "machine",
    "machine_text",
    "save_figure",
    "table",
    "write_whole",
]
