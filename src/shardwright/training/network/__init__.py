"""What a run moves between hosts, and what its plan predicts of that."""
