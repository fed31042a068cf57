"""Rates that the engine gives flows which all move bytes at the same time."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64
from foretrace.simulate.flows import engine
from foretrace.simulate.flows.flows import Flows
from foretrace.simulate.flows.shares import Shares


def engine_rates(flows: Flows, capacity: Float64) -> Float64:
    """Rate (F, bytes per second of one connection) of each flow; infinite for a flow without links."""
    fair, unit = Shares.of(flows.route_ptr, flows.route_link, flows.route_times, capacity)
    engine.move(fair, np.arange(len(flows)), np.zeros(0, dtype=np.int64))
    return np.where(np.diff(flows.route_ptr) > 0, fair.flows["rate"] * unit, np.inf)
