"""Trainings over rows of an embedding server, in processes of their own: roles, runs, and runs in turns."""
