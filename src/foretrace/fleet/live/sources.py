"""Where a snapshot comes from: Slurm's commands, run read-only, or a folder with what they printed."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError, refused
from foretrace.files import write_text
from foretrace.fleet.formats.slurm_cluster import pairs, topology_conf
from foretrace.fleet.formats.source import Source, decode, load
from foretrace.fleet.live import records
from foretrace.fleet.live.records import QueuedJob, SlurmNode, SlurmPartition, Snapshot
from foretrace.fleet.policies.slurm_options import SchedulerParameters

# All of them read only. What a file is, is told from its content, not its name.
COMMANDS = {
    "config.txt": ("scontrol", "show", "config"),
    "partition.txt": ("scontrol", "show", "partition"),
    "topology.txt": ("scontrol", "show", "topology"),
    "node.txt": ("scontrol", "-d", "show", "node"),
    "job.txt": ("scontrol", "-d", "-a", "show", "job"),
    "squeue.txt": ("squeue", "-a", "-h", "-o", records.SQUEUE),
}
NEEDED = ("node.txt", "partition.txt")
_WAIT_S = 60
_MOST_FILES = 100
_SAVE = "save them with foretrace fleet live --save FOLDER where Slurm runs"


def ask_slurm(run: Callable[[tuple[str, ...]], str] | None = None, *, save: Path | None = None) -> Snapshot:
    """Return a snapshot from what the commands print, which is also written into `save`. Raises ForetraceError."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SQUEUE_", "SCONTROL_"))}
    run = run or partial(call, environment=kept | {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"})
    said = {}
    for name, command in COMMANDS.items():
        try:
            said[name] = run(command)
        except ForetraceError:
            if name in NEEDED:
                raise
            said[name] = ""  # a site without topology, or one that hides its configuration
    if not (said["job.txt"].strip() or said["squeue.txt"].strip()):
        raise ForetraceError("neither scontrol show job nor squeue answers; ask the cluster's operators.")
    if save is not None:
        with suppress(OSError):  # of which writing tells
            save.mkdir(parents=True, exist_ok=True)
        for name, text in said.items():
            write_text(save / name, text)
    return snapshot([decode(name, text.encode()) for name, text in said.items()], "Slurm")


def call(
    command: Sequence[str], environment: Mapping[str, str], text: str | None = None, folder: Path | None = None
) -> str:  # fmt: skip
    """Return what a command of Slurm says, given this text. Raises ForetraceError with its complaint where it fails."""
    words = " ".join(command)[:200]
    try:
        done = subprocess.run(
            command, env=environment, input=text, text=True, errors="replace", capture_output=True, timeout=_WAIT_S,
            cwd=folder, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        text = f"there is no {command[0]} here; run this where Slurm runs, or give `from=FOLDER`."
        raise ForetraceError(text) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ForetraceError(f"{words} does not answer ({error}); ask whoever runs this Slurm.") from None
    if done.returncode:
        why = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise ForetraceError(f"{words} fails ({why}); ask whoever runs this Slurm.")
    return done.stdout


def read_folder(folder: str | Path) -> Snapshot:
    """Return a snapshot from files with outputs, whatever they are called. Raises ForetraceError."""
    with refused(f"cannot read {folder}", _SAVE):
        files = sorted(each for each in Path(folder).iterdir() if each.is_file())
    if len(files) > _MOST_FILES:
        raise ForetraceError(f"{folder} holds {len(files):,} files; give a folder with the outputs only.")
    return snapshot([load(each) for each in files], str(folder))


_JOBS = ("scontrol show job", "squeue --json", "squeue")  # the one that says most first
_KINDS: tuple[tuple[str, str, Callable[[Source], list[Any]]], ...] = (  # what it is, how it begins, its records
    (_JOBS[2], r"JobId=\S+ JobState=", lambda each: list(map(records.job_of, pairs(each.text, "JobId")))),
    (_JOBS[0], r"JobId=(?!.*ProcCnt=)", lambda each: list(map(records.job_of, pairs(each.text, "JobId")))),
    ("no job", r"No jobs", lambda _: []),
    ("node", r"NodeName=", lambda each: list(map(records.node_of, pairs(each.text, "NodeName")))),
    ("partition", r"PartitionName=", lambda each: list(map(records.partition_of, pairs(each.text, "PartitionName")))),
    ("leaf", r"(Switch|Block)Name=", lambda each: topology_conf(each).leaves),
    ("setting", r"Configuration data as of", lambda each: records.settings_of(each.text)),
    ("nothing", r"$|There is no|slurm_load|JobID\||JobId=", lambda _: []),
)


def snapshot(sources: list[Source], source: str) -> Snapshot:
    """Return what the outputs say together; each is known by its content. Raises ForetraceError."""
    found: dict[str, list[Any]] = {}  # records by what they are
    notes: list[str] = []
    for each in sources:
        notes += [f"{each.path}: {note}" for note in each.notes]
        made = _records(each)
        if not made:
            notes.append(f"{each.path} was not taken: it is no output of scontrol, squeue or sinfo that is read here")
        for kind, rows in made.items():
            if kind in _JOBS and kind in found:
                raise each.fail(f"a second output of {kind} is beside another; leave the one of the nodes' moment.")
            if kind in _JOBS and len({job.job for job in rows}) < len(rows):
                raise each.fail("a job stands twice; print every job once, without -r beside its array.")
            found.setdefault(kind, []).extend(rows)
    nodes: dict[str, SlurmNode] = {node.name: node for node in found.get("node", [])}
    if not nodes:
        raise ForetraceError(f"{source} says nothing of nodes; add the output of scontrol show node ({_SAVE}).")
    if not any(kind in found for kind in (*_JOBS, "no job")):
        raise ForetraceError(f"{source} says nothing of jobs; add the output of scontrol show job ({_SAVE}).")
    jobs: list[QueuedJob] = next((found[kind] for kind in _JOBS if kind in found), [])
    partitions: dict[str, SlurmPartition] = dict(found.get("partition", []))
    if not partitions:
        for name in dict.fromkeys(name for node in nodes.values() for name in node.partitions or ("",)):
            hosts = (node.name for node in nodes.values() if name in (node.partitions or ("",)))
            partitions[name] = SlurmPartition(nodes=frozenset(hosts))
        notes.append("limits of partitions are not known (no scontrol show partition)")
    settings = defaultdict(str, found.get("version", []) + found.get("setting", []))
    now = _now(jobs, settings["as_of"])
    # JSON does not say how long a job ran
    jobs = [
        replace(job, ran_s=max(now - job.start_s, 0.0))
        if job.running and job.ran_s == 0 and math.isfinite(job.start_s) else job
        for job in jobs
    ]  # fmt: skip
    return Snapshot(
        source=source, now_s=now, version=settings["slurm_version"], jobs=tuple(jobs), nodes=tuple(nodes.values()),
        partitions=partitions, leaves=dict(found.get("leaf", [])), notes=tuple(notes),
        parameters=SchedulerParameters.shown(settings["schedulerparameters"]),
        backfill=settings["schedulertype"] != "sched/builtin",
    )  # fmt: skip


def _records(each: Source) -> dict[str, list[Any]]:
    """Return what an output says by what it is, {} where it is none that is read. Raises ForetraceError."""
    first = each.first.lstrip()
    if not first.startswith("{"):
        return next(({kind: read(each)} for kind, begins, read in _KINDS if re.match(begins, first)), {})
    if not isinstance(each.json, dict):
        raise each.fail("is JSON that is cut or damaged; print it again.")
    made: dict[str, list[Any]] = {}
    if "jobs" in each.json:
        made[_JOBS[1]] = list(records.queue_json(each.json, each.path))
    if "nodes" in each.json:
        made["node"] = list(records.nodes_json(each.json, each.path))
    if made and (release := re.search(r'"release"\s*:\s*"([^"]{1,40})"', each.text)):
        made["version"] = [("slurm_version", release[1])]
    return made


def _now(jobs: list[QueuedJob], as_of: str) -> float:
    """Return when this was printed: a running job's start and run time say it to the second. Raises ForetraceError."""
    found = [each.start_s + each.ran_s for each in jobs if each.state == "RUNNING" and each.ran_s > 0]
    with suppress(ValueError):
        found = [each for each in found if math.isfinite(each)] or [records.stamp(as_of)]
    found = [each for each in found if math.isfinite(each)] or [each.submit_s for each in jobs]
    if not any(map(math.isfinite, found)):
        raise ForetraceError("when this was printed is not known; add the output of scontrol show config.")
    return max(filter(math.isfinite, found))
