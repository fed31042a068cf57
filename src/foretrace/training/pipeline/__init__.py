"""Pipeline-parallel training: tables of actions per process, their checks, and the runtime that executes them."""
