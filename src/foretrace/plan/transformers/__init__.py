"""Ways to train a large transformer on many devices: their times, their memory, the best of all of them."""
