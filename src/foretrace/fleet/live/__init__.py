"""A Slurm cluster as it stands: read through Slurm's own commands, and played on from that moment.

`records` parses what the commands print, `sources` runs or loads them, `snapshot` is what they say together, `history`
is how long jobs of such users ran, `forecast` plays the queue on, `questions` asks it.
"""
