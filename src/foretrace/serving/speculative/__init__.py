"""Speculative decoding: what a draft gains, how fast it must be, and which draft is best."""
