"""Exports where they are meant to go: a real Slurm, a real Ray, and what Volcano and Kueue accept."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.export import export
from foretrace.fleet.live import sources
from foretrace.fleet.live.records import QueuedJob
from foretrace.fleet.policies import parse
from foretrace.fleet.simulate import simulate
from foretrace.fleet.workload import Workload

TREE = ClusterTree.of((2, 2, 4), levels=("rack", "node"), name="2x2x4")


def work(*gpus: int) -> Workload:
    return Workload.of(submit_s=range(len(gpus)), gpus=gpus, work_s=[4.0] * len(gpus), estimate_s=[60.0] * len(gpus))


def test_scripts_for_slurm_run_as_predicted(tmp_path: Path) -> None:
    """Who starts before whom, on how many nodes below how many leaf switches, with how many GPUs on each."""
    from foretrace.fleet.rig.cluster import SlurmSetup, missing, private

    if why := missing():
        pytest.skip(why)
    jobs = work(16, 8, 8, 4)
    said = simulate(jobs, TREE, parse("fifo"), record="devices")
    files: dict[str, str] = {}
    for at, level in enumerate(("cluster", "rack", "rack", "node")):
        files |= export(
            jobs, TREE, said, to="slurm", job=str(jobs.job[at]), queue="all", level=level, command=("sleep", "4")
        )
    setup = SlurmSetup(
        nodes=4, gpus=4, racks=2, lines=("DefMemPerNode=1",), parameters={"bf_interval": 1, "batch_sched_delay": 0}
    )
    ran: dict[str, QueuedJob] = {}
    with private(setup) as slurm:
        names = {}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
            names[slurm.run("sbatch", "--parsable", "--output=/dev/null", str(tmp_path / name)).strip()] = name
        for _ in range(200):
            seen = sources.ask_slurm(lambda words: slurm.run(*words))
            ran |= {names[job.job]: job for job in seen.jobs if job.held}
            if all(job.state == "COMPLETED" for job in seen.jobs):
                break
            time.sleep(0.3)
        ended = {names[job.job]: job for job in seen.jobs}
    assert {job.state for job in ended.values()} == {"COMPLETED"}
    starts = np.array([ended[f"job-{at}.sbatch"].start_s for at in range(4)])
    assert starts[0] < starts[1] and starts[0] < starts[2] and starts[1] <= starts[3]
    assert [int(np.argmin(said.start_ns)), *np.argsort(said.start_ns[1:], kind="stable") + 1] == [0, 1, 2, 3]
    for at, (nodes, each, racks) in enumerate(((4, 4, 2), (2, 4, 1), (2, 4, 1), (1, 4, 1))):
        held = ran[f"job-{at}.sbatch"].held
        assert (len(held), set(held.values())) == (nodes, {each}), at
        assert len({int(name[1:]) // 2 for name in held}) == racks, at


# What the custom resource and batch/v1 accept, from the schemas that Volcano and Kubernetes publish: fields and types.
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
POD_GROUP = {
    "minMember": int, "minTaskMember": dict, "minResources": dict, "networkTopology": dict, "priorityClassName": str,
    "queue": str, "preemptable": bool,
}  # fmt: skip
JOB = {
    "suspend": bool, "parallelism": int, "completions": int, "completionMode": str, "backoffLimit": int,
    "template": dict, "activeDeadlineSeconds": int,
}  # fmt: skip
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def fits(spec: dict[str, Any], fields: dict[str, type]) -> None:
    for key, value in spec.items():
        assert key in fields and type(value) is fields[key], f"{key}: {value!r}"


@pytest.mark.parametrize("wait_s", [0.0, 600.0, float("inf")])
@pytest.mark.parametrize("gpus", [1, 4, 8, 16])
def test_volcano_accepts_what_is_written(gpus: int, wait_s: float) -> None:
    for text in export(work(gpus), TREE, to="volcano", queue="train", wait_s=wait_s, level="cluster").values():
        group, job = yaml.safe_load_all(text)
        assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
        fits(group["spec"], POD_GROUP)
        assert all(QUANTITY.fullmatch(str(each)) for each in group["spec"]["minResources"].values())
        wish = group["spec"].get("networkTopology", {"mode": "hard", "highestTierAllowed": 1})
        assert wish.keys() == {"mode", "highestTierAllowed"} and wish["mode"] in ("hard", "soft")
        assert type(wish["highestTierAllowed"]) is int
        fits(job["spec"], JOB)
        notes = job["spec"]["template"]["metadata"]["annotations"]
        assert notes == {"scheduling.k8s.io/group-name": group["metadata"]["name"]}
        assert job["spec"]["completions"] >= group["spec"]["minMember"], "else the gang would never be whole"


@pytest.mark.parametrize("wait_s", [0.0, 600.0, float("inf")])
@pytest.mark.parametrize("gpus", [1, 4, 8, 16])
def test_kueue_accepts_what_is_written(gpus: int, wait_s: float) -> None:
    """Its webhook takes one of three topology annotations, whose value is the key of a node label."""
    for text in export(work(gpus), TREE, to="kueue", queue="train", wait_s=wait_s).values():
        (job,) = yaml.safe_load_all(text)
        assert (job["apiVersion"], job["kind"], job["spec"]["suspend"]) == ("batch/v1", "Job", True)
        fits(job["spec"], JOB)
        assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "train"}
        notes = job["spec"]["template"].get("metadata", {}).get("annotations", {})
        known = {f"kueue.x-k8s.io/podset-{each}-topology" for each in ("required", "preferred")}
        assert len(notes) <= 1 and notes.keys() <= known
        assert all(LABEL_KEY.fullmatch(each) for each in notes.values())


@pytest.mark.slow
def test_a_real_ray_holds_what_is_reserved(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=4)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        for gpus, options in ((4, {}), (8, {"level": "cluster", "wait_s": 0.0})):
            files = export(work(gpus), TREE, to="ray", **options)  # type: ignore[arg-type]
            (tmp_path / "job.py").write_text(files["job-0.py"])
            group = runpy.run_path(str(tmp_path / "job.py"))["reserve"]()
            held = ray.util.placement_group_table(group)
            assert held["state"] == "CREATED"
            assert sum(each["GPU"] for each in held["bundles"].values()) == gpus
            assert len(set(held["bundles_to_node_id"].values())) == (1 if gpus == 4 else 2)
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()
        cluster.shutdown()
