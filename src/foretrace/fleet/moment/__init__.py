"""What is known at one moment of a simulation in plain Python: jobs, GPUs, the rules, and the view of a policy."""
