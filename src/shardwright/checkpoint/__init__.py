"""Checkpoints: the whole state of a run in files that any number of ranks can read.

`save` and `load` are what scripts use; the rest of this room is what they are made of.
"""

from shardwright.checkpoint.api import Loaded, load, save, wait
from shardwright.checkpoint.run_state import RandomState

__all__ = ["Loaded", "RandomState", "load", "save", "wait"]
