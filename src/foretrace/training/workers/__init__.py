"""How workers agree: policies, and what carries them."""
