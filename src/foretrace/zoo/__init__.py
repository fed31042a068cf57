"""Representative trainable models with synthetic data of the right shapes: what to measure predictions on."""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
