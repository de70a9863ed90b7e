"""Collectives of ranks on several hosts, with several on each."""
