"""Readers of data sets in their published file formats."""
