"""Compiles the operators of a program between its collectives."""
