"""Energy: settings of a machine at which the same work takes less of it, and still keeps its latency."""
