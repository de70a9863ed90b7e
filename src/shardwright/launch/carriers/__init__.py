"""The ways to a host."""
