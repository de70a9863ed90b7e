"""Answers what Python asks of the values of tensors, which a capture does not have."""
