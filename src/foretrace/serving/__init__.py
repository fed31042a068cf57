"""Serving models: a server on the cores of one machine, and a simulator of engines for large language models."""
