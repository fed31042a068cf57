"""Readers of fleets: logs of jobs, clusters, speeds, generators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.fuzz.reader import Figure, Reader, Samples, printed


@cache
def fleet_logs() -> dict[str, dict[str, bytes]]:
    """Logs by the format that they are of."""
    from tests.fleet.format_samples import SAMPLES

    endings = {"kueue": "json", "ray": "json", "swf": "swf", "slurm": "txt", "shockwave": "tsv"}
    found: dict[str, dict[str, bytes]] = {}
    for name, (text, kind) in SAMPLES.items():
        found.setdefault(kind, {})[f"{name}.{endings.get(kind, 'csv')}"] = text.encode()
    return found


def _play_fleet(format: str) -> Callable[[Path, int], Iterator[Figure]]:
    def play(path: Path, way: int) -> Iterator[Figure]:
        from foretrace.fleet import policies
        from foretrace.fleet.cluster import parse_cluster
        from foretrace.fleet.formats import read
        from foretrace.fleet.simulate import simulate
        from foretrace.report import fleet as report
        from foretrace.report.jsonout import dumps
        from foretrace.report.terminal import Terminal, render

        workload = read(path, format if way & 1 else "auto", salvage=bool(way & 2))
        workload.validate()
        yield "gpus", workload.gpus
        known = np.isfinite(workload.work_s)
        yield "work", workload.work_s[known]
        if way >= 4:
            return
        workload = replace(workload, work_s=np.where(known, workload.work_s, 100.0))
        for name in ("fifo", "srtf")[: 1 + (way < 2)]:
            result = simulate(workload, parse_cluster("2x2x4"), policies.parse(name))
            view = report.run(result, parse_cluster("2x2x4"), path=str(path))
            yield name, view
            dumps(view)
            printed(render(view, Terminal(width=100)))

    return play


@cache
def fleet_clusters() -> Samples:
    """Descriptions of clusters by other systems, and our own."""
    from tests.fleet.test_formats_clusters import CONF, NODES, YAML

    kubernetes = {
        "kind": "List",
        "items": [
            {"kind": "Topology",
             "spec": {"levels": [{"nodeLabel": "x/rack"}, {"nodeLabel": "kubernetes.io/hostname"}]}},
            *(
                {"kind": "Node",
                 "metadata": {"name": f"n{i}", "labels": {"x/rack": f"r{i // 2}", "gpu.product": "H100"}},
                 "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
                for i in range(4)
            ),
        ],
    }  # fmt: skip
    own = b"name: lab\nlevels: [rack, node]\nunits:\n- {count: [2, 4], gpus: 8, type: v100}\n"
    own += b"- {count: [1, 2], gpus: 4, type: a100}\ngbit_s: {node: 2400, rack: 400}\nquotas: {research: 64}\n"
    return {
        "topology_conf.txt": CONF.encode(), "topology.yaml": YAML.encode(), "nodes.txt": NODES.encode(),
        "kubernetes.json": json.dumps(kubernetes).encode(), "own.yaml": own,
        "alibaba.csv": b"sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\nn2,64000,262144,8,G2\n",
        "tiresias.csv": b"num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,4,8,64,256\n",
    }  # fmt: skip


def _play_fleet_cluster(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.formats import read_cluster
    from foretrace.fleet.scene import cluster_of

    tree = read_cluster(path, gpus_per_node=4 if way else None)
    yield "starts", np.concatenate(tree.starts)
    yield "rates", list(tree.gbit_s)
    if path.suffix == ".yaml" and "topology" not in path.name:
        yield "gpus", cluster_of(str(path)).gpus


def _throughputs() -> Samples:
    from tests.fleet.test_throughputs import SMALL

    return {"speeds.json": json.dumps(SMALL).encode()}


def _play_throughputs(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.speeds.throughputs import ThroughputTable

    table = ThroughputTable.read(path)
    for rows in table.alone.values():
        yield "alone", list(rows.values())
    for pairs in table.shared.values():
        yield "shared", [rate for both in pairs.values() for rate in both]


def _play_speed_table(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.speeds.table import TableSpeeds
    from foretrace.fleet.workload import Workload

    speeds = TableSpeeds.read(path, interpolate=True)
    yield "rows", [rate for rates in speeds.rates.values() for rate in rates.values()]
    models = sorted({model for model, _, _ in speeds.rates})[:3]
    jobs = Workload.of(submit_s=[0.0] * len(models), gpus=[2] * len(models), work_s=[1.0] * len(models), model=models)
    yield "kinds", speeds.kinds(jobs)


def _play_profiles(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.speeds import Shape
    from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds, load_profiles
    from foretrace.fleet.workload import Workload

    profiles = load_profiles(path)
    yield "profiles", [number for each in profiles for number in (each.compute_ms, each.gradient_mb, each.batch)]
    speeds = ClosedFormSpeeds(bandwidth_gb_s=[300, 25, 2.5], profiles=profiles)
    work = Workload.of(submit_s=[0.0], gpus=[8], work_s=[1.0], model=[profiles[0].name])
    rows = [speeds.speed(work, 0, Shape(8, units)) for units in ((1, 1, 1), (8, 1, 1), (8, 8, 1))]
    yield "speeds", [number for row in rows for number in (row.progress, row.communication)]


@cache
def _generators() -> Samples:
    from foretrace.fleet.synthetic import fit
    from foretrace.fleet.workload import Workload

    dice = np.random.default_rng(0)
    jobs = Workload.of(
        submit_s=np.sort(dice.uniform(0, 9e5, 60)), gpus=dice.choice([1, 2, 8], 60), work_s=dice.lognormal(7, 2, 60),
        tenant=["a", "b"] * 30,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder) / "g.json"
        fit(jobs).save(path)
        return {"generator.json": path.read_bytes()}


def _play_generator(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.synthetic import load_generator

    made = load_generator(path).generate(jobs=50, seed=1)
    made.validate()
    yield "work", made.work_s[np.isfinite(made.work_s)]


def _pollux_rows(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.pollux.profiles import _rows

    for row in _rows(path, ("num_nodes", "num_replicas", "step_time")):
        yield "row", np.abs(row)  # columns that may be below 0 are its own affair


@cache
def _queues() -> Samples:
    """What Slurm prints of a small queue, in each of its forms."""
    from tests.fleet.live.queues import job

    running = job(1, "RUNNING", nodes=2, gpus=4, ran="00:00:20", on="n[0-1]")
    array = job(3, ArrayJobId="3", ArrayTaskId="1-4%2", Dependency="afterany:1", Switches="1@00:05:00")
    rows = {"job_id": 7, "job_state": ["PENDING"], "node_count": {"set": True, "infinite": False, "number": 1},
            "time_limit": {"set": False, "infinite": True, "number": 0}, "submit_time": 1795435200,
            "partition": "all", "tres_per_node": "gres/gpu:2", "array_job_id": 0}  # fmt: skip
    table = "JobId=5_[1-3] JobState=PENDING NodeList= NumNodes=2 TimeLimit=5:00 RunTime=0:00 TresPerNode=gres:gpu:4 "
    table += "Partition=all SubmitTime=2026-11-23T12:00:00 JobName=a|b\n"
    table += "JobId=6 JobState=RUNNING NodeList=n1 NumNodes=1 TimeLimit=1-00:00:00 RunTime=0:09 TresPerNode=gpu:1 "
    table += "Partition=all SubmitTime=2026-11-23T12:00:00 JobName=c\n"
    shown = "JobId=9 UserId=ann(1) Name=a JobState=COMPLETED TimeLimit=5 StartTime=2026-11-23T12:00:00 "
    shown += "EndTime=2026-11-23T12:01:00 NodeCnt=1 ProcCnt=1 Tres=cpu=1,gres/gpu=2 Account=lab \n"
    return {
        "job.txt": f"{running}\n{job(2, nodes=2, gpus=4)}\n{array}".encode(), "squeue.txt": table.encode(),
        "squeue.json": json.dumps({"meta": {"slurm": {"release": "24.05"}}, "jobs": [rows]}).encode(),
        "node.txt": b"NodeName=n0 CPUTot=8 Gres=gpu:a100:4(S:0)\n   State=IDLE Partitions=all\n",
        "jobcomp.txt": shown.encode(),
        "partition.txt": b"PartitionName=all\n   DefaultTime=00:10:00 MaxTime=2-00:00:00 Nodes=n[0-1]\n",
        "topology.txt": b"SwitchName=s0 Level=0 Nodes=n[0-1]\nSwitchName=top Level=1 Switches=s0\n",
        "config.txt": b"Configuration data as of 2026-11-23T12:00:00\nSchedulerParameters = bf_interval=5\n",
    }  # fmt: skip


def _play_queue(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.live import questions, sources
    from foretrace.fleet.live.history import read_past
    from foretrace.report import fleet_slurm as report
    from foretrace.report.jsonout import dumps
    from foretrace.report.terminal import Terminal, render
    from tests.fleet.live.queues import job, write_queue

    past = read_past(path) if path.name == "jobcomp.txt" else []
    yield "past", [each.ran_s for each in past]
    with TemporaryDirectory() as name:
        folder = write_queue(Path(name) / "q", job(1, "RUNNING", gpus=4, ran="00:01:00", on="n0"), job(2, nodes=2))
        for each in ("job.txt", path.name) if path.name.startswith("squeue") else (path.name,):
            (folder / each).unlink(missing_ok=True)
        (folder / path.name).write_bytes(path.read_bytes())
        seen = sources.read_folder(folder)
        waiting = [each.job for each in seen.jobs if each.waiting]
        found = questions.ask(seen, past, draws=20, job=waiting[0] if waiting and way & 1 else None, racks=way & 2)
    view = report.live(found)
    yield "starts", view
    yield "low", [each.low_s for each in found.starts if each.low_s is not None]
    dumps(view)
    printed(render(view, Terminal(width=100)))


RESULTS = {"run|allox|physical": {"jct_list": [10.0, 20.0], "ftf_themis": [0.5, 1.0]}}
SIMULATORS = {
    "results.json": json.dumps(RESULTS).encode(),
    "samples.csv": b"duration,job\n10,a\n20,b\n4000,c\n",
    "cluster.csv": b"num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n1,32,4,64,256\n",
}


def _play_simulators(path: Path, way: int) -> Iterator[Figure]:
    from reproductions.shockwave.profile import read_results
    from reproductions.tiresias.cluster import Cluster
    from reproductions.tiresias.simulator import _read_samples

    if "results" in path.name:
        found = read_results(path)
        yield "results", len(found)
    elif "samples" in path.name:
        yield "samples", _read_samples(path)
    else:
        yield "cluster", Cluster.read(str(path)).total


def fleet_readers() -> Iterator[Reader]:
    """The readers of this file."""
    from foretrace.fleet.formats import FORMATS

    covers: tuple[str, ...]
    for format in FORMATS:
        if format not in fleet_logs():
            raise LookupError(f"tests/fleet/format_samples.py has no sample of the format {format}; add one.")
        module = FORMATS[format].rows.__module__.rpartition(".")[2]
        covers = ("fleet.formats.source", "fleet.formats.own", f"fleet.formats.{module}")
        samples = partial(fleet_logs().__getitem__, format)
        yield Reader(name=f"log-{format}", covers=covers, samples=samples, play=_play_fleet(format))
    yield Reader(name="fleet-cluster", covers=("fleet.cluster", "fleet.formats.clusters", "fleet.formats.source"),
                 samples=fleet_clusters, play=_play_fleet_cluster)  # fmt: skip
    yield Reader(name="throughputs", covers=("fleet.speeds.throughputs",), samples=_throughputs, play=_play_throughputs)
    table = b"model,gpus,nodes,gpu_type,steps_per_s\nbert,1,1,v100,2\nbert,2,1,v100,3.9\nbert,4,2,v100,6\n"
    rows = [{"model": "bert", "gpus": n, "level": 1, "steps_per_s": 2.0 * n} for n in (1, 2, 4)]
    speed = {"speeds.csv": table, "speeds.json": json.dumps(rows).encode()}
    yield Reader(name="speed-table", covers=("fleet.speeds.table",), samples=lambda: speed, play=_play_speed_table)
    profiles = {"profiles": [{"name": "m", "compute_ms": 90.0, "gradient_mb": 98, "batch": 32, "aliases": ["n"],
                              "published_scale": 0.5, "note": "x"}]}  # fmt: skip
    yield Reader(name="profiles", covers=("fleet.speeds.closed_form",), play=_play_profiles,
                 samples=lambda: {"profiles.json": json.dumps(profiles).encode()})  # fmt: skip
    yield Reader(name="generator", covers=("fleet.synthetic",), samples=_generators, play=_play_generator)
    covers = ("fleet.live.sources", "fleet.live.records", "fleet.live.history")
    yield Reader(name="queue", covers=covers, samples=_queues, play=_play_queue)
    covers = (
        "reproductions.shockwave.profile", "reproductions.tiresias.simulator", "reproductions.tiresias.cluster",
    )  # fmt: skip
    yield Reader(name="simulators", covers=covers, samples=lambda: SIMULATORS, play=_play_simulators)
    pollux = {"placements.csv": b"num_nodes,num_replicas,step_time\n1,1,0.1\n1,2,0.12\n2,4,0.2\n"}
    yield Reader(name="pollux-profile", covers=("fleet.pollux.profiles",), samples=lambda: pollux,
                 play=_pollux_rows)  # fmt: skip
