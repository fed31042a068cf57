"""A small decoder served for real, by the scheduler that the engine simulator runs."""
