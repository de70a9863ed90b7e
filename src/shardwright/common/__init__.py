"""Foundations of every other wing: files, C sources, words for people, and the private names of torch."""
