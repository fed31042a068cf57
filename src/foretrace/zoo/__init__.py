"""Representative trainable models with synthetic data of the right shapes: what to measure predictions on."""
