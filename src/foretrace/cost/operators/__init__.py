"""Operators timed on this machine, and the ratios that techniques ask of them."""
