"""Tensor programs (a loop nest with its schedule): made, run for real on a processor, and their latency predicted."""
