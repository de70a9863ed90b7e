"""Sizes of a batch that a trace leaves open, and the numbers that follow from them."""
