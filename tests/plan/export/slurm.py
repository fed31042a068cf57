"""A Slurm controller of its own for a test: 64 nodes of 8 GPUs that could be rented, no job ever runs."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "sbatch", "sinfo")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser={user}
StateSaveLocation={folder}
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=60
NodeName=n[1-64] CPUs=64 Gres=gpu:8 State=CLOUD
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """The first of Slurm's programs that is not here, or nothing."""
    return next((each for each in PROGRAMS if shutil.which(each, path=_PATH) is None), "")


@contextmanager
def controller(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch asks a controller that answers."""
    key, conf, names = folder / "munge.key", folder / "slurm.conf", ("pid-file", "log-file", "seed-file")
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = socket.gethostname().split(".")[0]
    conf.write_text(_CONF.format(host=host, port=port, folder=folder, user=getpass.getuser()))
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(conf)}
    own = [f"--{name}={folder / name}" for name in names]
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.sock'}", *own],
        ["slurmctld", "-D", "-f", str(conf)],
    )
    processes = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as said:
                processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        for _ in range(100):
            if not subprocess.run(["sinfo"], env=environment, capture_output=True, check=False).returncode:
                break
            time.sleep(0.2)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(20)
