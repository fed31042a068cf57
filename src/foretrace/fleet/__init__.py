"""Many jobs on one cluster: workloads, clusters as trees, scheduling policies, and the simulator that plays them."""
