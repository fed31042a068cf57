"""Techniques that trade memory for time."""
