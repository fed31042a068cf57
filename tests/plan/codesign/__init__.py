"""Tests of `foretrace.plan.codesign`."""
