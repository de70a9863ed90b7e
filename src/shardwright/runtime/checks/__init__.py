"""Checks around each step of a model, a class for each, so that no step gives wrong numbers."""
