"""Verify: a technique predicted and then run for real, arm against arm, and the ledger that keeps both figures."""
