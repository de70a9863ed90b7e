"""Checkpoints: the whole state of a run in files that any number of ranks can read."""
