"""Gradients that are reduced while the backward goes on."""
