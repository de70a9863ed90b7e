"""The trainer and its callbacks, its checkpoints, and what it tells."""
