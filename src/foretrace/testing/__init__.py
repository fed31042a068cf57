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

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)  # policies need nothing of what techniques need
