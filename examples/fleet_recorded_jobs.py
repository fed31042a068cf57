"""Two recorded jobs on one cluster: how fast each runs where it is placed, and what two ways of placing them cost.

Without recordings it makes its own: a few steps of train_cnn.py and train_recommender.py beside this file.

    python examples/fleet_recorded_jobs.py
    python examples/fleet_recorded_jobs.py --job cnn=run/cnn --job recommender=run/recommender
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import FleetResult
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Shape
from foretrace.fleet.speeds.graph import GraphSpeeds
from foretrace.fleet.workload import Workload

HERE = Path(__file__).resolve().parent
SCRIPTS = {"cnn": "train_cnn.py", "recommender": "train_recommender.py"}
LATENCY_US = (5.0, 15.0, 30.0)


def record(folder: Path, steps: int) -> dict[str, Path]:
    """A recording of each script, made by `foretrace record`."""
    found = {}
    for name, script in SCRIPTS.items():
        print(f"recording {steps} steps of {script}", flush=True)
        command = [sys.executable, "-m", "foretrace", "record", "--out", str(folder / name), "--steps", str(steps)]
        command += ["--stop-after", "--", sys.executable, str(HERE / script), "--threads", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found[name] = folder / name
    return found


def placements(cluster: ClusterTree, gpus: int) -> dict[str, Shape]:
    """The same GPUs packed into one node, spread over the nodes of one rack, and over racks."""
    per_node, nodes = cluster.per_node, cluster.units(0) // cluster.units(1)
    found = {}
    if gpus <= per_node:
        found["one node"] = Shape(gpus, (1, 1, 1))
    for used in range(2, nodes + 1):
        if gpus % used == 0 and gpus // used <= per_node:
            found[f"{used} nodes of one rack"] = Shape(gpus, (used, 1, 1))
    racks = cluster.units(1)
    if gpus % racks == 0 and gpus // racks <= nodes * per_node:
        used = min(gpus // racks, nodes)
        if gpus % (racks * used) == 0:
            found[f"{racks * used} nodes of {racks} racks"] = Shape(gpus, (racks * used, racks, 1))
    return found


def show_speeds(speeds: GraphSpeeds, models: Mapping[str, Path], cluster: ClusterTree, gpus: int) -> None:
    jobs = Workload.of(
        submit_s=[0.0] * len(models), gpus=[gpus] * len(models), work_s=[1.0] * len(models), model=[*models]
    )
    print(f"\nSpeed on {gpus} GPUs relative to one (in brackets: share of the step that waits for messages)")
    for job, model in enumerate(models):
        print(f"  {model}: {1e3 * speeds.step_s(model):.1f} ms a step on one device")
        for name, shape in placements(cluster, gpus).items():
            speed = speeds.speed(jobs, job, shape)
            print(f"    {name:22} {speed.progress:6.3f}   ({speed.communication:.0%})")


def mixed(speeds: GraphSpeeds, models: Mapping[str, Path], count: int, seed: int) -> Workload:
    """Jobs of both models at random times, of 1 to 8 GPUs and 20,000 to 200,000 steps."""
    random = np.random.default_rng(seed)
    model = random.choice(list(models), count)
    steps = random.integers(20_000, 200_000, count).astype(np.float64)
    step_s = np.array([speeds.step_s(each) for each in model])
    gpus = random.choice([1, 2, 4, 8], count, p=[0.3, 0.2, 0.3, 0.2])
    every = float((steps * step_s * gpus).sum()) / count / 32  # as fast as 32 GPUs work it off at full speed
    return Workload.of(
        submit_s=np.cumsum(random.exponential(every, count)),
        gpus=gpus,
        work_s=steps * step_s,
        model=model.tolist(),
        iterations=steps,
        name=f"{count} jobs",
    )


def line(result: FleetResult, model: str) -> str:
    which = (result.workload.model == model) & (result.workload.gpus > 1)
    held, waits = result.held_ns[which].sum(), result.comm_ns[which].sum()
    return f"{np.nanmean(result.jct_s[which]) / 3600:8.2f} h {waits / held:9.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", default=[], help="NAME=RECORDING or NAME=GRAPH; twice or more")
    parser.add_argument("--steps", type=int, default=4, help="steps to record of each script")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of the mixed workload")
    parser.add_argument("--seed", type=int, default=0, help="of the mixed workload")
    args = parser.parse_args()

    cluster = ClusterTree.of((2, 4, 4), levels=("rack", "node"), gbit_s=(200.0, 25.0, 10.0), name="2 racks of 4 nodes")
    with tempfile.TemporaryDirectory() as scratch:
        given = dict(each.split("=", 1) for each in args.job if "=" in each)
        models = {name: Path(path) for name, path in given.items()} or record(Path(scratch), args.steps)
        speeds = GraphSpeeds.on(cluster, models, latency_us=LATENCY_US)
        for gpus in (4, 8):
            show_speeds(speeds, models, cluster, gpus)
        jobs = mixed(speeds, models, args.jobs, args.seed)
        print(f"\n{len(jobs)} jobs of these models on {cluster.name} ({cluster.gpus} GPUs), first come, first served")
        print(f"  {'placement':10} {'makespan':>10}   " + "   ".join(f"{name + ': JCT, comm.':>21}" for name in models))
        for rule in ("strict", "greedy"):
            policy = Policy(name=f"fifo, {rule}", admit_rule="skip", place_rule=rule)
            result = simulate(jobs, cluster, policy, speeds=speeds)
            columns = "   ".join(f"{line(result, name):>21}" for name in models)
            print(f"  {rule:10} {result.makespan_s / 3600:8.1f} h   {columns}")
        print(f"\n{speeds.simulations} steps among several GPUs were simulated; they rest on:")
        for each in speeds.assumptions:
            if each.startswith(("every", "networks")) or "of gradients" in each:
                print(f"  {each}")
        print(
            f"  and {len(speeds.assumptions)} sentences in all, with the ranges of what data-parallel takes for granted"
        )


if __name__ == "__main__":
    try:
        main()
    except ForetraceError as error:
        sys.exit(str(error))
