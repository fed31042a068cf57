"""Device placement by Tarnawski et al. (NeurIPS 2020): its published workloads."""
