"""Decisions written for Slurm, Kueue, Volcano and Ray say what was decided and parse back."""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.export import export
from foretrace.fleet.export.ask import clock
from foretrace.fleet.result import FleetResult, Segments
from foretrace.fleet.workload import Workload
from reproductions.results import simple

CLUSTER = parse_cluster("2x4x8@h100")  # racks x nodes x GPUs
DNS = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
# fields of the objects as their Go types declare them (batch/v1, volcano-sh/apis scheduling/v1beta1)
JOB_SPEC = {"suspend", "parallelism", "completions", "completionMode", "backoffLimit", "template"}
GROUP_SPEC = {"minMember", "queue", "minResources", "networkTopology"}


def jobs(*gpus: int, **columns: Any) -> Workload:
    n = len(gpus)
    return Workload.of(submit_s=range(n), gpus=gpus, work_s=[60.0] * n, tenant=["train"] * n, **columns)


def directives(script: str) -> dict[str, str]:
    """Options of a batch script; they must stand before the first command."""
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    words = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in lines if line.startswith("#SBATCH")]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def placed(workload: Workload, cluster: ClusterTree, held: dict[int, list[int]]) -> FleetResult:
    """A result in which the jobs hold these GPUs from their submission on."""
    n = len(held)
    sizes = np.array([len(each) for each in held.values()], np.int64)
    start = workload.submit_ns[list(held)]
    segments = Segments(
        job=np.array(list(held), np.int64), start_ns=start, end_ns=start + 1, gpus=sizes, level=np.zeros(n, np.int64),
        dead_ns=np.zeros(n, np.int64), offset=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        devices=np.array([gpu for each in held.values() for gpu in each], np.int64),
    )  # fmt: skip
    return simple(
        workload, policy="x", cluster=cluster.name, gpus=cluster.gpus, start_ns=workload.submit_ns,
        end_ns=workload.submit_ns + 1, segments=segments,
    )  # fmt: skip


def test_slurm_says_nodes_and_the_delay_timer() -> None:
    work = jobs(8, 16, 12, 17, estimate_s=[90000, math.nan, 59.5, math.nan], gpu_type=["", "h100", "", ""])
    files = export(work, CLUSTER, to="slurm", wait_s=7200)
    assert list(files) == ["job-0.sbatch", "job-1.sbatch", "job-2.sbatch", "job-3.sbatch"]
    one, two, three, four = (directives(text) for text in files.values())
    assert one == {"job-name": "job-0", "partition": "train", "nodes": "1", "gpus-per-node": "8", "time": "1-01:00:00"}
    assert (two["nodes"], two["gpus-per-node"], two["switches"]) == ("2", "h100:8", "1@02:00:00")
    assert (three["nodes"], three["gpus-per-node"], three["time"]) == ("2", "6", "00:01:00")
    assert (four["nodes"], four["gpus"]) == ("3", "17")  # three nodes cannot hold equal parts of it
    assert "scontrol update JobId=... NumNodes=1-8" in files["job-0.sbatch"]
    assert "max_switch_wait" in files["job-1.sbatch"]


def test_slurm_preferences_and_wide_levels() -> None:
    assert directives(export(jobs(8), CLUSTER, to="slurm", wait_s=0)["job-0.sbatch"])["nodes"] == "1-8"
    ever = directives(export(jobs(16), CLUSTER, to="slurm")["job-0.sbatch"])
    assert ever["switches"] == "1"
    anywhere = directives(export(jobs(16), CLUSTER, to="slurm", level="cluster")["job-0.sbatch"])
    assert "switches" not in anywhere
    deep = parse_cluster("pod=2,rack=2,node=2,gpu=8")
    pod = directives(export(jobs(20), deep, to="slurm", level="pod", wait_s=60)["job-0.sbatch"])
    assert pod["switches"] == "2@00:01:00"  # two racks of 16 GPUs are the fewest that hold it
    with pytest.raises(ForetraceError, match="cannot be a partition"):
        export(Workload.of(submit_s=[0], gpus=[1], work_s=[1], tenant=["a b; rm"]), CLUSTER, to="slurm")


def test_the_shape_of_a_placement_is_exported() -> None:
    work = jobs(8, 8, 6)
    result = placed(work, CLUSTER, {0: [0, 1, 8, 9, 16, 17, 24, 25], 1: list(range(32, 40)), 2: [2, 3, 10, 40, 41, 42]})
    files = export(work, CLUSTER, result, to="slurm", wait_s=math.inf)
    one, two, three = (directives(text) for text in files.values())
    assert (one["nodes"], one["gpus-per-node"], one["switches"]) == ("4", "2", "1")  # four nodes of one rack
    assert (two["nodes"], two["gpus-per-node"]) == ("1", "8")
    assert (three["nodes"], three["gpus"]) == ("3", "6")
    assert "switches" not in two
    assert "switches" not in three  # it lies in both racks
    tighter = export(work, CLUSTER, result, to="slurm", job="0", level="node")
    assert directives(tighter["job-0.sbatch"])["nodes"] == "1"


def test_islands_below_nodes_are_not_machines() -> None:
    islands = parse_cluster("node=4,nvlink=2,gpu=4")
    assert directives(export(jobs(8), islands, to="slurm")["job-0.sbatch"])["nodes"] == "1"
    assert directives(export(jobs(4), islands, to="slurm")["job-0.sbatch"])["gpus-per-node"] == "4"


def test_kueue_requires_prefers_or_leaves_open() -> None:
    def one(wait_s: float, level: str | None = None) -> tuple[dict[str, Any], str, dict[str, str]]:
        files = export(jobs(16, gpu_type=["h100"]), CLUSTER, to="kueue", wait_s=wait_s, level=level, namespace="ml")
        job = yaml.safe_load(files["job-0.yaml"])
        return job, files["job-0.yaml"], files

    job, _, files = one(math.inf)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["metadata"] == {"name": "job-0", "namespace": "ml", "labels": {"kueue.x-k8s.io/queue-name": "train"}}
    assert set(job["spec"]) == JOB_SPEC
    assert (job["spec"]["suspend"], job["spec"]["parallelism"], job["spec"]["completions"]) == (True, 2, 2)
    template = job["spec"]["template"]
    key = "kueue.x-k8s.io/podset-required-topology"
    assert template["metadata"]["annotations"] == {key: "cloud.provider.com/topology-rack"}
    assert template["spec"]["restartPolicy"] == "Never"
    (container,) = template["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "h100" in json.dumps(template["spec"]["affinity"])
    assert list(files) == ["job-0.yaml"]
    job, _, _ = one(0)
    assert list(job["spec"]["template"]["metadata"]["annotations"]) == ["kueue.x-k8s.io/podset-preferred-topology"]
    _, text, files = one(3600)
    assert list(files) == ["job-0.yaml", "job-0.after-3600s.yaml"]
    assert "required-topology" in text
    assert "preferred-topology" in files["job-0.after-3600s.yaml"]
    job, _, _ = one(3600, "cluster")
    assert "metadata" not in job["spec"]["template"]
    labels = {"rack": "example.com/rack"}
    assert "example.com/rack" in export(jobs(16), CLUSTER, to="kueue", labels=labels)["job-0.yaml"]


def test_kueue_puts_a_machine_into_one_pod() -> None:
    job = yaml.safe_load(export(jobs(8), CLUSTER, to="kueue")["job-0.yaml"])
    assert job["spec"]["parallelism"] == 1
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    spread = yaml.safe_load(export(jobs(8), CLUSTER, to="kueue", wait_s=0)["job-0.yaml"])
    assert spread["spec"]["parallelism"] == 8
    nameless = Workload.of(submit_s=[0], gpus=[1], work_s=[1])
    part = export(jobs(1, share=[0.25]), CLUSTER, to="kueue")["job-0.yaml"]
    assert "# it needs 0.25 of a GPU" in part
    with pytest.raises(ForetraceError, match="names no LocalQueue"):
        export(nameless, CLUSTER, to="kueue")
    assert export(nameless, CLUSTER, to="kueue", queue="user-queue")


def test_volcano_groups_pods() -> None:
    files = export(jobs(16), CLUSTER, to="volcano", wait_s=600)
    group, job = yaml.safe_load_all(files["job-0.yaml"])
    assert (group["apiVersion"], group["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
    assert set(group["spec"]) == GROUP_SPEC
    assert group["spec"]["minMember"] == job["spec"]["parallelism"] == 2
    assert group["spec"]["minResources"] == {"nvidia.com/gpu": "16"}
    assert group["spec"]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 1}
    assert job["spec"]["template"]["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": "job-0"}
    assert job["spec"]["template"]["spec"]["schedulerName"] == "volcano"
    later, _ = yaml.safe_load_all(files["job-0.after-600s.yaml"])
    assert later["spec"]["networkTopology"] == {"mode": "soft", "highestTierAllowed": 1}
    wide, _ = yaml.safe_load_all(export(jobs(64), CLUSTER, to="volcano")["job-0.yaml"])
    assert "networkTopology" not in wide["spec"]


def reserved(code: str) -> list[tuple[Any, dict[str, Any]]]:
    """Bundles and strategy of every placement group that the code asks for, in order."""
    tree = ast.parse(code)
    named = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "placement_group"
    ]
    return [(named, {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}) for call in calls]


def test_ray_reserves_and_waits() -> None:
    files = export(jobs(4), CLUSTER, to="ray", wait_s=600)
    said = json.loads(files["job-0.json"])
    assert (said["strategy"], said["wait_s"], said["then"]) == ("STRICT_PACK", 600, {"strategy": "PACK"})
    assert said["bundles"] == [{"GPU": 1}] * 4
    assert reserved(files["job-0.py"]) == [
        (said["bundles"], {"strategy": "STRICT_PACK", "name": "job-0"}),
        (said["bundles"], {"strategy": "PACK", "name": "job-0"}),
    ]
    assert "timeout_seconds=600.0" in files["job-0.py"]
    rack = json.loads(export(jobs(16), CLUSTER, to="ray", labels={"rack": "ray.io/gpu-domain"})["job-0.json"])
    assert rack["topology_strategy"] == {"ray.io/gpu-domain": "STRICT_PACK"}
    assert (rack["bundles"], rack["then"]) == ([{"GPU": 8}] * 2, None)
    loose = export(jobs(16), CLUSTER, to="ray", wait_s=0)
    assert reserved(loose["job-0.py"]) == [([{"GPU": 8}] * 2, {"strategy": "PACK", "name": "job-0"})]
    part = json.loads(export(jobs(1, share=[0.25]), CLUSTER, to="ray")["job-0.json"])
    assert part["bundles"] == [{"GPU": 0.25}]


@settings(max_examples=30)
@given(
    name=st.text(min_size=1, max_size=70),
    gpus=st.integers(1, 64),
    wait_s=st.sampled_from([0.0, 0.4, 61.0, 1e6, math.inf]),
    level=st.sampled_from([None, "node", "rack", "cluster"]),
)
def test_whatever_the_name_and_size_files_parse_and_ask_for_all_gpus(
    name: str, gpus: int, wait_s: float, level: str | None
) -> None:
    work = Workload.of(submit_s=[0, 0], gpus=[gpus, 1], work_s=[1, 1], job=[name, name + "!"])
    for to in ("slurm", "kueue", "volcano", "ray"):
        try:
            files = export(work, CLUSTER, to=to, level=level, wait_s=wait_s, queue="q")
        except ForetraceError as error:
            assert level is not None
            assert gpus > {"node": 8, "rack": 32}.get(level, 64)
            assert "holds the" in str(error)
            continue
        assert len({file.split(".")[0] for file in files}) == 2  # every job has files of its own
        asked = next(text for file, text in files.items() if not file.endswith(".py"))
        assert all(DNS.fullmatch(file.split(".")[0]) for file in files)
        if to == "slurm":
            said = directives(asked)
            count = re.sub(r"^\D*:", "", said.get("gpus", said.get("gpus-per-node", "")))
            assert int(count) * (1 if "gpus" in said else int(said["nodes"])) == gpus
        elif to == "ray":
            assert sum(bundle["GPU"] for bundle in json.loads(asked)["bundles"]) == gpus
            assert all(ast.parse(text) for file, text in files.items() if file.endswith(".py"))
        else:
            job = list(yaml.safe_load_all(asked))[-1]
            each = int(job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            assert each <= 8
            assert each * job["spec"]["parallelism"] == gpus


def test_kinds_are_those_that_a_simulation_takes() -> None:
    """Names without regard to case; a gang is of one kind, and so many of one kind there must be."""
    mixed = parse_cluster("1x2x4@a100+1x1x8@h100")
    said = export(jobs(4, gpu_type=["A100|L4"]), mixed, to="slurm")["job-0.sbatch"]
    assert directives(said)["gpus-per-node"] == "a100:4"
    with pytest.raises(ForetraceError, match="can never hold the 12 GPUs of job '0'"):
        export(jobs(12), mixed, to="slurm")


def test_mistakes_are_said() -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: export(jobs(1), CLUSTER, to="pbs"), "cannot export to 'pbs'; there are slurm, kueue, volcano, ray"),
        (lambda: export(jobs(1), CLUSTER, to="slurm", wait_s=-1), "waits 0 seconds or more"),
        (lambda: export(jobs(1), CLUSTER, to="slurm", wait_s=math.nan), "waits 0 seconds or more"),
        (lambda: export(jobs(1), CLUSTER, to="slurm", level="row"), "no level 'row'"),
        (lambda: export(jobs(1), CLUSTER, to="kueue", labels={"row": "x"}), "no level 'row'"),
        (lambda: export(jobs(1), CLUSTER, to="slurm", job="7"), "no job '7'"),
        (lambda: export(jobs(65), CLUSTER, to="slurm"), "can never hold the 65 GPUs of job '0'"),
        (lambda: export(jobs(1, gpu_type=["k80"]), CLUSTER, to="slurm"), "1 GPUs of kind k80"),
        (lambda: export(jobs(9), CLUSTER, to="slurm", level="node"), "no node .* holds the 9 GPUs .* is 'rack'"),
    ]
    for call, said in calls:
        with pytest.raises(ForetraceError, match=said):
            call()
    work = jobs(1, 1)
    with pytest.raises(ForetraceError, match="the result is of 2 jobs"):
        export(jobs(1), CLUSTER, placed(work, CLUSTER, {0: [0]}), to="slurm")


def test_times_as_slurm_writes_them() -> None:
    assert [clock(each) for each in (0, 0.1, 59, 3600, 86399.5, 86400)] == [
        "00:00:00", "00:00:01", "00:00:59", "01:00:00", "1-00:00:00", "1-00:00:00",
    ]  # fmt: skip
