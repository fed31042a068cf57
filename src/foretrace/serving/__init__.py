"""Serving models: a server on the cores of one machine, and a simulator of engines for large language models."""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
