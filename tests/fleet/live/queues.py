"""Small queues written as Slurm prints them."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "slurm"


def job(
    number: int,
    state: str = "PENDING",
    *,
    nodes: int = 1,
    gpus: int = 1,
    limit: str = "00:10:00",
    ran: str = "00:00:00",
    on: str = "",
    **more: str,
) -> str:
    """A record of `scontrol show job`; `more` replaces or adds keys."""
    said = {
        "JobId": str(number), "JobName": f"j{number}", "UserId": "ann(1)", "Priority": str(1000 - number),
        "Account": "lab", "JobState": state, "Reason": "Priority" if state == "PENDING" else "None",
        "RunTime": ran, "TimeLimit": limit, "SubmitTime": "2026-11-23T12:00:00", "EligibleTime": "2026-11-23T12:00:00",
        "StartTime": "2026-11-23T12:00:00" if on else "Unknown", "Partition": "all", "NodeList": on or "(null)",
        "NumNodes": str(nodes), "NumCPUs": str(nodes), "TresPerNode": f"gres:gpu:{gpus}",
    } | more  # fmt: skip
    return f"JobId={said.pop('JobId')} JobName={said.pop('JobName')}\n" + "".join(
        f"   {key}={value}\n" for key, value in said.items()
    )


def write_queue(folder: Path, *jobs: str, nodes: int = 2, gpus: int = 4, parameters: str = "") -> Path:
    """A folder with a cluster of one leaf switch per two nodes, and these jobs."""
    folder.mkdir(exist_ok=True)
    (folder / "job.txt").write_text("\n".join(jobs) or "No jobs in the system\n")
    (folder / "node.txt").write_text("\n".join(
        f"NodeName=n{i} CPUTot=8 Gres=gpu:{gpus}\n   State=IDLE Partitions=all" for i in range(nodes)
    ))  # fmt: skip
    (folder / "partition.txt").write_text(
        f"PartitionName=all\n   Default=YES MaxTime=UNLIMITED Nodes=n[0-{nodes - 1}]\n"
    )
    (folder / "topology.txt").write_text("".join(
        f"SwitchName=leaf{i} Level=0 Nodes=n[{2 * i}-{2 * i + 1}]\n" for i in range(nodes // 2)
    ))  # fmt: skip
    wanted = parameters or "bf_interval=1,batch_sched_delay=0,sched_min_interval=0"
    (folder / "config.txt").write_text(
        "Configuration data as of 2026-11-23T12:00:00\nSLURM_VERSION = 22.05.8\nSchedulerType = sched/backfill\n"
        f"SchedulerParameters = {wanted}\n"
    )
    return folder
