"""The fleet's simulation of Slurm, held against a real Slurm."""
