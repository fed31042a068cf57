"""What a host spends per kernel in recordings of eager PyTorch: the evidence behind `foretrace.model.lower.HostCosts`.

    python benchmarks/host_costs.py [--traces DIR] [--json]

Recordings are found by FORETRACE_SHARED_DATA. The time that profiling costs is taken out as `Run.graph` does, which
is not all of it, so what is printed bounds the host's own time from above.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from foretrace import flow
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind
from tables import shared_traces

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_FEW = 40  # kernels of a phase that say too little


def costs(graph: TaskGraph) -> dict[str, float]:
    """Microseconds: host per kernel by phase (launch included), one launch, launch to idle stream, between kernels."""
    kernel, host = graph.kind == TaskKind.KERNEL, np.isin(graph.kind, (TaskKind.CPU, TaskKind.CALL))
    found = {}
    for phase in _PHASES:
        own = graph.phase == phase
        if (kernel & own).sum() >= _FEW:
            found[phase.name.lower()] = float(graph.dur[host & own].sum() / (kernel & own).sum()) / 1e3
    dst = graph.dst
    launch = (graph.edge_kind == EdgeKind.LAUNCH) & kernel[dst] & graph.from_start
    stream = (graph.edge_kind == EdgeKind.STREAM) & kernel[dst] & ~graph.from_start
    if launch.any():
        found["launch"] = float(np.median(graph.dur[graph.src[launch]])) / 1e3
        found["latency"] = float(np.median(graph.typical[launch])) / 1e3
    if stream.any():
        found["gap"] = float(np.median(graph.typical[stream])) / 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of recordings; default: those of the shared data")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.traces or shared_traces()
    if folder is None:
        raise SystemExit("host_costs: no recordings; give --traces DIR or set FORETRACE_SHARED_DATA.")
    rows = []
    for path in sorted(folder.rglob("*.json.gz")):
        try:
            graph = flow.read(path).graph().graph
        except ForetraceError:
            continue
        if graph.info.platform != "cpu" and (found := costs(graph)):
            rows.append({"recording": path.name.split(".")[0], "device": next(iter(graph.info.devices), ""), **found})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    names = ("forward", "backward", "optimizer", "launch", "latency", "gap")
    print(f"{'us per kernel':58}" + "".join(f"{name:>11}" for name in names))
    for row in rows:
        label = f"{str(row['recording'])[:36]} {str(row['device'])[:20]}"
        print(f"{label:58}" + "".join(f"{row[name]:11.1f}" if name in row else f"{'':>11}" for name in names))
    middle = [np.median([float(row[name]) for row in rows if name in row]) for name in names]
    print(f"{'median':58}" + "".join(f"{value:11.1f}" for value in middle))


if __name__ == "__main__":
    main()
