"""How foretrace answers: a struct per command, and its text, JSON, page and timeline.

`report.plan.placed(...)` loads `report/plan.py` when it is called, so that a command loads its own answer alone.
"""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
