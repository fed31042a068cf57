"""Tests that every technique must pass, ours and those of other packages, and small jobs to run them on.

class TestMine(TechniqueConformance):
    technique = Mine(strength=2.0)
"""

from foretrace.testing.technique import TechniqueConformance, recorded, small_training

__all__ = ["TechniqueConformance", "recorded", "small_training"]
