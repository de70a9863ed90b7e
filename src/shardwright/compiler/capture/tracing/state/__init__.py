"""Sees what a step leaves in Python for the next one."""
