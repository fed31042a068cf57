"""What a step keeps in memory, and when."""
