"""What operators take on accelerators that need not exist: systolic arrays, lanes, a buffer; arrays that skip zeros; look-up tables."""
