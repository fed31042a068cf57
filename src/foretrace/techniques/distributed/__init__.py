"""Techniques of several workers: what they exchange, when and over what."""
