"""Delay timers of a real Slurm, against strict consolidation and spreading."""
