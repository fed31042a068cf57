"""Seconds of collectives on a network."""
