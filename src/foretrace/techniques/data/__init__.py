"""Techniques that change how batches are loaded."""
