"""Search for the techniques that make a run fastest (dPRO)."""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
