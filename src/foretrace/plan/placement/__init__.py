"""Which device runs which part of a model, proven as good as can be (Tarnawski et al., NeurIPS 2020)."""
