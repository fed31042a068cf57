"""What operators take on accelerators that need not exist: systolic arrays, vector lanes, a buffer."""
