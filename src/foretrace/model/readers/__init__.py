"""Operator graphs from files and recordings."""
