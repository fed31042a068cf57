"""Speculative decoding for real: a target and its drafts on one thread, what they take, and that nothing changes."""
