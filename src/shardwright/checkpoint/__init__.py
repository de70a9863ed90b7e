"""Checkpoints: the whole state of a run in files that any number of ranks can read.

`save` and `load` are what scripts use, `load_state`, `read_state` and `save_pretrained` for files of others; the rest
of this room is what they are made of.
"""

from shardwright.checkpoint.api import Loaded, load, newest, save, wait
from shardwright.checkpoint.exchange.exchange import load_state, read_state
from shardwright.checkpoint.exchange.pretrained import save_pretrained
from shardwright.checkpoint.saving.asynchronous import wait_copied
from shardwright.checkpoint.whole_run.run_state import RandomState

__all__ = [
    "Loaded",
    "RandomState",
    "load",
    "load_state",
    "newest",
    "read_state",
    "save",
    "save_pretrained",
    "wait",
    "wait_copied",
]
