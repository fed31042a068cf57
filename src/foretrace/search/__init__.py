"""Searching for the cheapest point of a space: one way to ask for it, one answer, and strategies that differ."""
