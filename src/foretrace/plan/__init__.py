"""Search for the techniques that make a run fastest (dPRO)."""
