"""Pipelines: what a schedule of actions takes in time and memory, and planners that choose the stages."""
