"""Verify: a technique predicted and then run for real, arm against arm, and the ledger that keeps both figures."""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
