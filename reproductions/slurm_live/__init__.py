"""`foretrace fleet live` against a real Slurm under load."""
