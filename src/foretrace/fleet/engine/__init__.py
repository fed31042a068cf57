"""The fleet's loop, compiled: `memory` is what it knows, `waiting` the line, `placing` the GPUs.

`decisions` is the loop itself.
"""
