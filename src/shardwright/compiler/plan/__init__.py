"""Decide the layout of every value and the strategy of every operator."""
