"""Techniques that change what is computed, and how."""
