"""A real Slurm on this machine, alone in a folder, to hold simulations against."""
