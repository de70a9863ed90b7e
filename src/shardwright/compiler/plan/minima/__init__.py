"""Finds the least of a sum of tables over discrete variables, whatever they stand for."""
