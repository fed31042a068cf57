"""What a model computes: operators with their work and memory, captured without running them, and their lowering."""
