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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.rig.cluster import START_S, SlurmSetup, guarded
from foretrace.fleet.rig.play import RigRun, Told
from foretrace.fleet.workload import SECOND, Workload

HOST = "127.0.0.2"  # loopback, under an address that Ray does not take for the machine's own
RETRY_S = 1.0  # the longest until a group that waits is tried again
POLL_S = 0.05
MOST_NODES = 16  # a Python process or two and 0.2 GB each
_PORTS = (
    "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
    "runtime-env-agent-port", "metrics-export-port",
)  # fmt: skip
_QUIET = (
    "--disable-usage-stats", "--num-cpus=0", "--min-worker-port=0", "--max-worker-port=0",
    "--object-store-memory=80000000",
)  # fmt: skip


def missing() -> str:
    """Return why this machine can have no private Ray, one sentence; "" where it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed here; install it with: pip install ray."
    return ""


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

    def write(folder: Path, ports: Sequence[int]) -> tuple[list[list[str]], dict[str, str]]:
        program = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
        commands = []
        for at in range(setup.nodes + 1):  # the head first; each at an address of its own, as which Ray finds it
            mine = zip(_PORTS, ports[1 + at * len(_PORTS) :], strict=False)
            words = [program, "start", "--block", *_QUIET, *(f"--{name}={port}" for name, port in mine)]
            host = HOST if at == 0 else f"127.0.1.{at}"
            words += [f"--node-ip-address={host}", f"--num-gpus={setup.gpus if at else 0}"]
            head = ["--head", "--include-dashboard=false", f"--port={ports[0]}", f"--temp-dir={folder}"]
            words += [f"--address={HOST}:{ports[0]}"] if at else head
            # one after the other: each names its socket after those that are there
            before = f"{folder}/session_latest/sockets/raylet" + f".{at - 1}" * (at > 1)
            wait = f"until [ -S {before} ]; do sleep 0.1; done; exec "
            commands.append(["/bin/bash", "-c", wait * bool(at) + shlex.join(words)])
        return commands, os.environ | {"RAY_AUTH_MODE": "disabled"}

    with guarded("ft-ray-", 1 + len(_PORTS) * (setup.nodes + 1), write) as (folder, ports, pids):
        try:
            _connect(ray, ports[0], setup.nodes, folder, pids)
            return _played(ray, setup, workload, progress)
        finally:
            ray.shutdown()


def _connect(ray: Any, port: int, nodes: int, folder: Path, pids: Sequence[int]) -> None:
    """Wait until all nodes are there. Raises ForetraceError with the last words of the head where they never are."""
    until, ready = time.monotonic() + START_S, 0
    while ready < nodes:
        if time.monotonic() > until or not all(Path(f"/proc/{pid}").exists() for pid in pids):
            words = [each.read_text(errors="replace").split()[-25:] for each in sorted(folder.glob("daemon[0-1].txt"))]
            said = " / ".join(map(" ".join, words))
            raise ForetraceError(f"the private Ray got {ready} of its {nodes} nodes ready: {said}.")
        time.sleep(0.2)
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
            if not ray.is_initialized():
                ray.init(
                    address=f"{HOST}:{port}", log_to_driver=False, configure_logging=False, logging_level="ERROR",
                    _node_ip_address=HOST,
                )  # fmt: skip
            ready = sum(bool(each["Alive"] and each["Resources"].get("GPU")) for each in ray.nodes())


def _played(ray: Any, setup: SlurmSetup, workload: Workload, progress: Told | None) -> RigRun:
    from ray.util import placement_group, placement_group_table, remove_placement_group

    known = {each["NodeID"]: at for at, each in enumerate(each for each in ray.nodes() if each["Resources"].get("GPU"))}
    count = len(workload)
    start, end = np.full(count, np.nan), np.full(count, np.nan)
    nodes: list[tuple[int, ...]] = [()] * count
    groups: dict[str, tuple[int, Any]] = {}
    epoch, submitted, since, longest = time.time(), 0, time.monotonic(), float(workload.work_s.max()) + START_S
    while np.isnan(end).any():
        now = time.time() - epoch
        while submitted < count and workload.submit_ns[submitted] / SECOND <= now:
            gpus = int(workload.gpus[submitted])
            on_one = gpus <= setup.gpus
            bundles, strategy = ([{"GPU": gpus}], "STRICT_PACK") if on_one else ([{"GPU": 1}] * gpus, "PACK")
            made = placement_group(bundles, strategy=strategy)
            groups[made.id.hex()] = submitted, made
            submitted += 1
        said = placement_group_table() if groups else {}
        for name, (at, group) in list(groups.items()):
            if np.isnan(start[at]) and said.get(name, {}).get("state") == "CREATED":
                start[at], since = now, time.monotonic()
                nodes[at] = tuple(sorted({known[each] for each in said[name]["bundles_to_node_id"].values()}))
            elif start[at] + workload.work_s[at] <= now:
                remove_placement_group(group)
                end[at], since = now, time.monotonic()
                del groups[name]
        if progress is not None:
            progress((submitted + int(np.isfinite(end).sum())) / (2 * count))
        if submitted == count and time.monotonic() - since > longest:
            raise ForetraceError(f"nothing has happened on the private Ray for {longest:.0f} s; try fewer nodes.")
        time.sleep(POLL_S)
    return RigRun(
        submit_s=workload.submit_ns / SECOND, start_s=start, end_s=end, nodes=tuple(nodes), epoch_s=epoch,
        launch_s=float((end - start - workload.work_s).mean()),
    )  # fmt: skip
