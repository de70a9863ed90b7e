"""A directory of checkpoints, local or remote: every file operation, and which checkpoints stay."""
