"""Batches for ranks: the loaders, what they yield, and where in the data a run is."""
