"""How much memory a step needs at its peak with techniques that trade time for it.

The recorded peak by category (`simulate.memory`) less what the techniques say that they need not keep. What they save
beyond the activations alive at the peak does not count: there the peak is elsewhere. 16-bit activations of mixed
precision are not reckoned with, so a prediction with it is on the safe side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.memory import MemorySplit

_NOT_KEPT = re.compile(r"about ([\d.e+]+) MB per step need not be kept")
_SHRUNK = re.compile(r"about ([\d.e+]+) MB saved for the backward pass shrink to ([\d.e+]+) MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory at the peak of a step, bytes."""

    recorded: int
    activations: int  # of it
    buckets: int = 0  # copies of gradients that wait to be sent

    @classmethod
    def of(cls, split: MemorySplit) -> Peak:
        """The recorded one."""
        return cls(recorded=split.peak_bytes, activations=split.at_peak_bytes.get("activations", 0))

    def after(self, graph: TaskGraph, *, since: int = 0) -> int:
        """Bytes at the peak of a graph whose changes from number `since` on are techniques applied to the recording."""
        left = float(self.activations)
        for change in graph.changes[since:]:
            if found := _NOT_KEPT.search(change.what):
                left -= min(1e6 * float(found[1]), left)
            elif found := _SHRUNK.search(change.what):
                before, after = float(found[1]), float(found[2])
                left *= after / before if before else 1.0
        return round(self.recorded - self.activations + left) + self.buckets
