"""What a checkpoint is made of: the manifest, its containers, the pieces that ranks hold."""
