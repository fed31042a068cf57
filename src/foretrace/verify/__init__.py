"""Run a prediction for real, both arms interleaved, and keep what was predicted beside what was measured."""
