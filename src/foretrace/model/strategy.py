"""`Strategy`: which device of a cluster runs which operator.

The general form that planners search over and `lower` turns into a task graph: one device index per operator. What is
split over several devices (a batch, a weight) is several operators of an operator graph that was split before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import OperatorGraph


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """`placement` has the device of every node, counted from 0; empty: device 0 runs all of them."""

    placement: tuple[int, ...] = ()

    def devices_of(self, graph: OperatorGraph) -> npt.NDArray[np.int64]:
        """Return the device of every node (n rows). Raises ForetraceError where the placement is not of this graph."""
        if not self.placement:
            return np.zeros(len(graph), dtype=np.int64)
        if len(self.placement) != len(graph):
            what = f"{len(self.placement)} devices for the {len(graph)} operators of {graph.name}"
            raise ForetraceError(f"the strategy names {what}; give one for each.")
        found = np.array(self.placement, dtype=np.int64)
        if found.min() < 0:
            raise ForetraceError(f"the strategy names device {found.min()}; devices are counted from 0.")
        return found
