"""Tests of placements of rows."""
