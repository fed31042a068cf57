"""What an operator costs: times measured on a machine, and ratios between an operator and its changed twin."""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
