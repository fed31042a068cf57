"""Accelerators that one might build: cycles and area."""
