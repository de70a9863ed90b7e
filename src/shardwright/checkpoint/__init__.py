"""Checkpoints: the whole state of a run in files that any number of ranks can read.

`save` and `load` are what scripts use; the rest of this room is what they are made of.
"""

from shardwright.checkpoint.api import Loaded, RandomState, load, save

__all__ = ["Loaded", "RandomState", "load", "save"]
