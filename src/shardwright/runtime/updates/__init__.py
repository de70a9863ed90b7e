"""Optimizer steps on sharded parameters, and the comparison of these steps between ranks."""
