"""Timing and checking collectives."""
