"""Scheduling policies, one file each; `registry` finds them by name."""

from __future__ import annotations

from foretrace.fleet.policies.registry import make, names, parse

__all__ = ["make", "names", "parse"]
