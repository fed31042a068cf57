"""When everything runs: the two engines, `Timeline`, and what holds the step back."""
