"""Accelerators that one might build: what they take for the work of a model."""
