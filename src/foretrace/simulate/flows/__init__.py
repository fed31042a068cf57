"""Bytes over links that tasks share."""
