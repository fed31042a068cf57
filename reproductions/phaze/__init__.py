"""PHAZE: accelerator and plan searched together."""
