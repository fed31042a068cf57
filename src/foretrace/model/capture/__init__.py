"""Operator graphs from trainings and modules that never run."""
