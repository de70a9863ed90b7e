"""Writing checkpoints, synchronously or beside the training loop."""
