"""The training loop: its callbacks, its checkpoints, and what it says of the network at the end."""
