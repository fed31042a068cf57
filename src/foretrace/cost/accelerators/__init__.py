"""What operators take on accelerators that one might build: systolic arrays, arrays that skip zeros, look-ups."""
