"""Looking at checkpoints without loading them."""
