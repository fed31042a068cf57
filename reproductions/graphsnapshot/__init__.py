"""GraphSnapShot (Liu et al., 2024): caches of neighbour lists for sampling, what they save and what they cost."""
