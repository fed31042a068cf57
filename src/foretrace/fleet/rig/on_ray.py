"""The same jobs on a private Ray: a head and a raylet per virtual node on loopback; a job is a placement group.

`cluster.guarded` starts and ends it as it does a Slurm. Ray tries each group that waits again within a second
(gcs_placement_group_manager.cc: after 0.1 s at first, 1.5 times as long each time), whoever fits first: `fifo-skip`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.rig.cluster import START_S, SlurmSetup, guarded
from foretrace.fleet.rig.play import RigRun, Told, in_time
from foretrace.fleet.workload import SECOND, Workload

HOST = "127.0.0.2"  # loopback, under an address that Ray does not take for the machine's own
RETRY_S = 1.0  # the longest until a group that waits is tried again
MOST_NODES = 16  # a Python process or two and 0.2 GB each
_QUIET = "--disable-usage-stats --num-cpus=0 --min-worker-port=0 --max-worker-port=0 --object-store-memory=80000000"


def missing() -> str:
    """Return why this machine can have no private Ray, one sentence; "" where it can."""
    there = importlib.util.find_spec("ray") is not None
    return "" if there else "Ray is not installed here; install it with: pip install ray."


def play(setup: SlurmSetup, workload: Workload, progress: Told | None = None) -> RigRun:
    """Reserve GPUs for each job when its time has come, for as long as it runs; seconds are not rounded.

    Raises ForetraceError where Ray is not there, does not start, or cannot be that large.
    """
    if lacks := missing():
        raise ForetraceError(lacks)
    if setup.racks != 1 or setup.nodes > MOST_NODES:
        raise ForetraceError(
            f"a private Ray has 1 to {MOST_NODES} nodes and no racks, got nodes={setup.nodes} racks={setup.racks}; "
            "give such nodes= and racks=1."
        )
    import ray

    if ray.is_initialized():
        raise ForetraceError("this process is connected to a Ray already; call ray.shutdown() first.")

    def write(folder: Path, ports: Sequence[int]) -> tuple[list[str], dict[str, str]]:
        program = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
        start = f"{shlex.quote(program)} start --block {_QUIET}"
        head = f"--node-ip-address={HOST} --num-gpus=0 --head --include-dashboard=false --port={ports[0]}"
        commands = [f"exec {start} {head} --dashboard-agent-listen-port={ports[1]} --temp-dir={folder}"]
        for at in range(setup.nodes):  # each at an address of its own, as which Ray finds it
            # one after the other: each names its socket after those that are there
            before = f"{folder}/session_latest/sockets/raylet" + f".{at}" * (at > 0)
            commands.append(
                f"until [ -S {before} ]; do sleep 0.1; done; exec {start} --address={HOST}:{ports[0]} "
                f"--node-ip-address=127.0.1.{at + 1} --num-gpus={setup.gpus} "
                f"--dashboard-agent-listen-port={ports[at + 2]}"
            )
        return commands, os.environ | {"RAY_AUTH_MODE": "disabled"}

    def ready(_: Path, ports: Sequence[int]) -> int:
        with socket.create_connection((HOST, ports[0]), timeout=1.0):
            if not ray.is_initialized():
                ray.init(
                    address=f"{HOST}:{ports[0]}", log_to_driver=False, configure_logging=False, logging_level="ERROR",
                    _node_ip_address=HOST,
                )  # fmt: skip
        return sum(bool(each["Alive"] and each["Resources"].get("GPU")) for each in ray.nodes())

    try:
        with guarded("Ray", setup.nodes, 2, write, ready):
            ran = _played(ray, setup, workload, progress)
            ray.shutdown()  # while there is whom to tell
    finally:
        ray.shutdown()
    return ran


def _played(ray: Any, setup: SlurmSetup, workload: Workload, progress: Told | None) -> RigRun:
    from ray.util import placement_group, placement_group_table, remove_placement_group

    known = {each["NodeID"]: at for at, each in enumerate(each for each in ray.nodes() if each["Resources"].get("GPU"))}
    count, epoch = len(workload), time.time()
    start, end = np.full(count, np.nan), np.full(count, np.nan)
    nodes: list[tuple[int, ...]] = [()] * count
    groups: dict[int, Any] = {}

    def submit(job: int) -> None:
        gpus = int(workload.gpus[job])
        on_one = gpus <= setup.gpus
        bundles, strategy = ([{"GPU": gpus}], "STRICT_PACK") if on_one else ([{"GPU": 1}] * gpus, "PACK")
        groups[job] = placement_group(bundles, strategy=strategy)

    def ended() -> int:
        now, said = time.time() - epoch, placement_group_table() if groups else {}
        for job, group in list(groups.items()):
            shown = said.get(group.id.hex(), {})
            if np.isnan(start[job]) and shown.get("state") == "CREATED":
                start[job] = now
                nodes[job] = tuple(sorted({known[each] for each in shown["bundles_to_node_id"].values()}))
            elif start[job] + workload.work_s[job] <= now:
                remove_placement_group(groups.pop(job))
                end[job] = now
        return int(np.isfinite(end).sum())

    events: list[tuple[float, Callable[[], object]]] = [
        (float(submit_ns / SECOND), partial(submit, job)) for job, submit_ns in enumerate(workload.submit_ns)
    ]
    in_time(epoch, events, count, ended, float(workload.work_s.max()) + START_S, progress)
    return RigRun(
        submit_s=workload.submit_ns / SECOND, start_s=start, end_s=end, nodes=tuple(nodes), epoch_s=epoch,
        launch_s=float((end - start - workload.work_s).mean()),
    )  # fmt: skip
