"""Finds where values stand that a step reads beside its tensors, and compares them."""
