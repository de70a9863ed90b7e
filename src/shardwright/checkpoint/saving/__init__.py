"""Writing a checkpoint, beside the loop where asked."""
