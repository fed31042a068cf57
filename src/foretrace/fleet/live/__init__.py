"""A Slurm cluster as it stands: read through Slurm's own commands, and played on from that moment.

`records` parses what the commands print into a `Snapshot`, `sources` runs or loads them, `history` is how long jobs of
such users ran, `queue` puts all in numbers, `forecast` plays the queue on, `questions` asks it.
"""
