"""The format of a checkpoint: the manifest, its containers, the pieces that ranks hold."""
