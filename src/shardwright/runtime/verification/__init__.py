"""Measuring that many devices give what one gives."""
