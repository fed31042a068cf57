"""Zeros of real training, and what an array that skips them gains: Sarma et al., 2021."""
