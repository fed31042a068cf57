"""Where a snapshot comes from: Slurm's commands, run read-only, or a folder with what they printed."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.fleet.formats.source import Source, decode, load
from foretrace.fleet.live import records
from foretrace.fleet.live.snapshot import QueuedJob, SlurmNode, SlurmPartition, Snapshot
from foretrace.fleet.policies.slurm_options import SchedulerParameters

# All of them read only. What a file is, is told from its content, not its name.
COMMANDS = {
    "config.txt": ("scontrol", "show", "config"),
    "partition.txt": ("scontrol", "show", "partition"),
    "topology.txt": ("scontrol", "show", "topology"),
    "node.txt": ("scontrol", "-d", "show", "node"),
    "job.txt": ("scontrol", "-d", "-a", "show", "job"),
    "squeue.txt": ("squeue", "-a", "-o", records.SQUEUE),
}
NEEDED = ("node.txt", "partition.txt")
_WAIT_S = 60
_MOST_FILES = 100
_SAVE = "save them with foretrace fleet live --save FOLDER where Slurm runs"


def ask_slurm(run: Callable[[tuple[str, ...]], str] | None = None, *, save: Path | None = None) -> dict[str, str]:
    """Return what the commands print now, by file name, also written into `save`.

    Raises ForetraceError where Slurm is not there or does not answer.
    """
    said = {}
    for name, command in COMMANDS.items():
        try:
            said[name] = (run or _run)(command)
        except ForetraceError:
            if name in NEEDED:
                raise
            said[name] = ""  # a site without topology, or one that hides its configuration
    if not (said["job.txt"].strip() or said["squeue.txt"].strip()):
        raise ForetraceError("neither scontrol show job nor squeue answers; ask the cluster's operators.")
    if save is not None:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ForetraceError(f"cannot write to {save} ({error.strerror or error}); choose another.") from None
        for name, text in said.items():
            write_text(save / name, text)
    return said


def _run(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        raise ForetraceError(f"there is no {command[0]} here; run this where Slurm runs, or give `from=FOLDER`.")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCONTROL_"))}
    environment = kept | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_WAIT_S, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ForetraceError(f"{' '.join(command)} does not answer ({error}); ask the cluster's operators.") from None
    if done.returncode:
        why = " ".join(done.stderr.decode(errors="replace").split())[:200]
        raise ForetraceError(f"{' '.join(command)} fails ({why}); ask the cluster's operators.")
    return done.stdout.decode(errors="replace")


def read_folder(folder: str | Path) -> Snapshot:
    """Return a snapshot from files that hold what the commands printed, whatever they are called. Raises
    ForetraceError.
    """
    try:
        files = sorted(each for each in Path(folder).iterdir() if each.is_file())
    except OSError as error:
        raise ForetraceError(f"cannot read {folder} ({error.strerror or error}); {_SAVE}.") from None
    if len(files) > _MOST_FILES:
        raise ForetraceError(f"{folder} holds {len(files):,} files; give a folder with the outputs only.")
    return snapshot([load(each) for each in files], str(folder))


def read_slurm(said: Mapping[str, str], source: str = "Slurm") -> Snapshot:
    """Return a snapshot from what `ask_slurm` returned. Raises ForetraceError."""
    return snapshot([decode(name, text.encode()) for name, text in said.items()], source)


def snapshot(sources: list[Source], source: str) -> Snapshot:
    """Return what the outputs say together; each is known by its content. Raises ForetraceError."""
    shown: dict[str, list[QueuedJob]] = {}  # by kind of output
    nodes: dict[str, SlurmNode] = {}
    partitions: list[SlurmPartition] = []
    leaves: dict[str, tuple[str, ...]] = {}
    settings: dict[str, str] = {}
    notes: list[str] = []
    for each in sources:
        notes += [f"{each.path}: {note}" for note in each.notes]
        first, whole = each.first.lstrip(), each.json if each.first.lstrip().startswith("{") else {}
        if not isinstance(whole, dict):
            raise each.fail("is JSON that is cut or damaged; print it again.")
        kind, jobs = "", list[QueuedJob]()
        if "jobs" in whole:
            kind, jobs = "squeue --json", records.queue_json(whole, each.path)
        elif "nodes" in whole:
            nodes |= {node.name: node for node in records.nodes_json(whole, each.path)}
        elif first.startswith("JobId=") and "ProcCnt=" not in first:
            kind, jobs = "scontrol show job", list(map(records.job_of, records.pairs(each.text, "JobId")))
        elif first.startswith("NodeName="):
            nodes |= {node.name: node for node in map(records.node_of, records.pairs(each.text, "NodeName"))}
        elif first.startswith("PartitionName="):
            partitions += map(records.partition_of, records.pairs(each.text, "PartitionName"))
        elif first.startswith(("SwitchName=", "BlockName=")):
            leaves |= records.leaves_of(each.text)
        elif first.startswith("Configuration data as of"):
            settings |= records.settings_of(each.text)
            settings["as_of"] = first.removeprefix("Configuration data as of").strip()
        elif "JOBID" in first and ("STATE" in first or " ST " in first):
            kind, jobs = "squeue", records.queue_table(each)
        elif first and not first.startswith(("No jobs", "There is no", "slurm_load", "JobID|", "JobId=")):
            notes.append(f"{each.path} was not taken: it is no output of scontrol, squeue or sinfo that is read here")
        if whole:
            settings.setdefault("slurm_version", _version(whole))
        if kind in shown:
            raise each.fail(f"a second output of {kind} is beside another; leave the one of the nodes' moment.")
        if len({job.job for job in jobs}) < len(jobs):
            raise each.fail("a job stands twice; print every job once, without -r beside its array.")
        shown |= {kind: jobs} if kind else {}
    if not nodes:
        raise ForetraceError(f"{source} says nothing of nodes; add the output of scontrol show node ({_SAVE}).")
    if not shown and not any(each.first.startswith("No jobs") for each in sources):
        raise ForetraceError(f"{source} says nothing of jobs; add the output of scontrol show job ({_SAVE}).")
    # the one that says most
    jobs = next((shown[kind] for kind in ("scontrol show job", "squeue --json", "squeue") if kind in shown), [])
    if not partitions:
        made: dict[str, list[str]] = {}
        for node in nodes.values():
            for name in node.partitions or ("",):
                made.setdefault(name, []).append(node.name)
        partitions = [SlurmPartition(name=name, nodes=frozenset(hosts)) for name, hosts in made.items()]
        notes.append("limits of partitions are not known (no scontrol show partition)")
    now = _now(jobs, settings.get("as_of", ""))
    # JSON does not say how long a job ran
    jobs = [
        replace(job, ran_s=max(now - job.start_s, 0.0))
        if job.running and job.ran_s == 0 and math.isfinite(job.start_s) else job
        for job in jobs
    ]  # fmt: skip
    return Snapshot(
        source=source, now_s=now, version=settings.get("slurm_version", ""), jobs=tuple(jobs),
        nodes=tuple(nodes.values()), partitions=tuple(partitions), leaves=leaves, notes=tuple(notes),
        parameters=SchedulerParameters.shown(settings.get("schedulerparameters", "")),
        backfill=settings.get("schedulertype", "") != "sched/builtin",
    )  # fmt: skip


def _version(whole: Mapping[str, Any]) -> str:
    meta = whole.get("meta")
    said = (meta.get("slurm") or meta.get("Slurm")) if isinstance(meta, dict) else None
    return str(said.get("release", ""))[:40] if isinstance(said, dict) else ""


def _now(jobs: list[QueuedJob], as_of: str) -> float:
    """Return the moment of the outputs: a running job's start and run time say it to the second. Raises
    ForetraceError.
    """
    found = [each.start_s + each.ran_s for each in jobs if each.state == "RUNNING" and each.ran_s > 0]
    with suppress(ValueError):
        found = [each for each in found if math.isfinite(each)] or [records.stamp(as_of)]
    found = [each for each in found if math.isfinite(each)] or [each.submit_s for each in jobs]
    if not any(map(math.isfinite, found)):
        raise ForetraceError("when this was printed is not known; add the output of scontrol show config.")
    return max(filter(math.isfinite, found))
