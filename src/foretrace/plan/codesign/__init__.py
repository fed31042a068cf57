"""Which accelerator to build, together with the plan that uses it."""
