"""Tests that every technique, policy, search strategy and store of rows must pass, also those of other packages.

class TestMine(TechniqueConformance):
    technique = Mine(strength=2.0)

class TestMyPolicy(PolicyConformance):
    def policy(self): return MyPolicy(name="mine")

class TestMySearch(SearchConformance):
    def strategy(self): return MySearch()

class TestMyRows(RowsConformance):
    def rows(self, values): return MyRows(values)

class TestMySync(SyncPolicyConformance):
    def policy(self): return MyPolicy(every=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.testing.policy import PolicyConformance, small_jobs
    from foretrace.testing.rows import RowsConformance
    from foretrace.testing.search import SearchConformance
    from foretrace.testing.sync import SyncPolicyConformance
    from foretrace.testing.technique import TechniqueConformance, recorded, small_training

__all__ = [
    "PolicyConformance", "RowsConformance", "SearchConformance",
    "SyncPolicyConformance", "TechniqueConformance", "recorded", "small_jobs",
    "small_training",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return loaded where used: policies need nothing of what techniques need."""
    if name in ("PolicyConformance", "small_jobs"):
        from foretrace.testing import policy

        return getattr(policy, name)
    if name == "RowsConformance":
        from foretrace.testing.rows import RowsConformance

        return RowsConformance
    if name == "SearchConformance":
        from foretrace.testing.search import SearchConformance

        return SearchConformance
    if name == "SyncPolicyConformance":
        from foretrace.testing.sync import SyncPolicyConformance

        return SyncPolicyConformance
    if name in __all__:
        from foretrace.testing import technique

        return getattr(technique, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
