"""Bytes that a run moves between hosts, and those that its plan predicts."""
