"""Named optimisations: each predicts its effect on a `TaskGraph` and says what it assumes.

The techniques are loaded when they are first used: `foretrace.techniques.PrefetchData(workers=4)`.
"""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
