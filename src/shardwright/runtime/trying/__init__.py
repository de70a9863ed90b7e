"""Tries the loss of a model that runs as it is, before ranks are given parts of a batch."""
