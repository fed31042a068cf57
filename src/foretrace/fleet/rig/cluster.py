"""A private Slurm: a controller and a daemon per virtual node on loopback, in a folder of its own.

`private` starts one and ends it with the block. A guardian process owns all daemons (`guardian`), so that nothing stays
behind however the block ends. Ports come from a block that a running cluster holds by listening on its first port, so
two never meet. A Slurm that is installed and configured on this machine is neither read nor touched.
Debian's build of Slurm knows several daemons per host (slurmd -N).
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.live import sources
from foretrace.fleet.rig import guardian

ACCOUNTING = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr")  # where there is any
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
MOST_NODES = 512  # 4 MB each; more would be a load test of this machine
START_S = 90.0
_BLOCK, _FIRST_PORT, _LAST_PORT = 640, 10240, 32768  # below the ports that the kernel gives out by itself
_SOCKET = 108  # bytes of the path of a Unix socket, with the one that ends it


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSetup:
    """What a private Slurm looks like: nodes × gpus in racks (leaf switches) of equal size below one switch.

    backfill: sched/backfill, else sched/builtin, which lets nobody pass. parameters: of SchedulerParameters, as
    slurm.conf names them. lines: further lines of slurm.conf. accounting: what sacctmgr adds to a database of its own
    before the controller starts; none: no accounting.
    """

    nodes: int = 64
    gpus: int = 4
    racks: int = 4
    backfill: bool = True
    parameters: Mapping[str, int | None] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    accounting: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raise ForetraceError where there can be no such cluster."""
        if not 1 <= self.nodes <= MOST_NODES:
            raise ForetraceError(f"`nodes` must be 1 to {MOST_NODES}, got {self.nodes}.")
        if not 1 <= self.gpus <= 64:
            raise ForetraceError(f"`gpus` per node must be 1 to 64, got {self.gpus}.")
        if self.racks < 1 or self.nodes % self.racks:
            raise ForetraceError(f"`racks` must divide the {self.nodes} nodes, got {self.racks}.")

    @property
    def tree(self) -> ClusterTree:
        """The same cluster for simulations; nodes in the order of Slurm."""
        return ClusterTree.of((self.racks, self.nodes // self.racks, self.gpus), levels=("rack", "node"), name="slurm")

    def node(self, at: int) -> str:
        """Return what a node is called."""
        return f"n{at:03d}"

    def listed(self, first: int, last: int) -> str:
        """Return neighbouring nodes as Slurm lists them."""
        return f"n[{first:03d}-{last:03d}]"


class PrivateSlurm:
    """A Slurm that runs. `environment` is what its commands need; `run` calls one.

    completed: the file of jobcomp/filetxt, a line per job that ended.
    """

    def __init__(self, setup: SlurmSetup, folder: Path) -> None:
        self.setup, self.folder, self.completed = setup, folder, folder / "completed"
        known = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environment = known | {
            "PATH": _path(), "SLURM_TIME_FORMAT": "%s", "SLURM_CONF": str(folder / "slurm.conf"),
            "SLURMDBD_CONF": str(folder / "slurmdbd.conf"), "MYSQL_UNIX_PORT": str(folder / "db.s"),
        }  # fmt: skip

    def run(self, program: str, *words: str, text: str | None = None) -> str:
        """Return what a command of Slurm says. Raises ForetraceError with its complaint where it fails."""
        return sources.call([program, *words], self.environment, text, self.folder)


def missing(*, accounting: bool = False) -> str:
    """Return why this machine can have no private Slurm, or none with accounting, one sentence; "" where it can."""
    wanted = [(PROGRAMS, "Slurm", PACKAGES), (ACCOUNTING, "The accounting of Slurm", ACCOUNTING_PACKAGES)]
    for names, what, packages in wanted if accounting else wanted[:1]:
        if lacks := [name for name in names if shutil.which(name, path=_path()) is None]:
            return f"{what} is not installed here ({lacks[0]} is missing); install it with: apt-get install {packages}."
    if os.geteuid() != 0:
        return "a private Slurm starts its node daemons as root; run this as root, in a container for example."
    return ""


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"


@contextmanager
def private(setup: SlurmSetup, *, under: Path | None = None) -> Iterator[PrivateSlurm]:
    """Start a Slurm of this kind, ready for jobs; ended with the block, its folder (made below `under`) removed.

    Raises ForetraceError where Slurm is not installed or does not start.
    """
    setup.validate()
    if lacks := missing(accounting=bool(setup.accounting)):
        raise ForetraceError(lacks)

    def idle(folder: Path, _: Sequence[int]) -> int:
        return sum(map(int, PrivateSlurm(setup, folder).run("sinfo", "-h", "--states=idle", "--format=%D").split()))

    with guarded("Slurm", setup.nodes, 3, partial(_write, setup), idle, under=under) as folder:
        made = PrivateSlurm(setup, folder)
        for words in setup.accounting:
            made.run("sacctmgr", "-i", *words.split())
        yield made


@contextmanager
def guarded(
    engine: str, nodes: int, more: int,
    write: Callable[[Path, Sequence[int]], tuple[list[str], Mapping[str, str]]],
    ready: Callable[[Path, Sequence[int]], int], *, under: Path | None = None,
) -> Iterator[Path]:  # fmt: skip
    """Yield a folder with daemons that a guardian owns, once all nodes are ready; all ends with the block, and with us.

    more: ports that they need beside one per node; write: fills the folder, given the ports, and says the lines of
    shell that become the daemons, and their environment; ready: how many nodes are. Raises ForetraceError with the last
    words of the daemons where some never are.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"ft-{engine.lower()}-", dir=under))
    try:
        held, ports = _ports(nodes + more)
        with held:
            commands, environment = write(folder, ports)
            (folder / guardian.DAEMONS).write_text("\n".join(commands))
            started = subprocess.Popen(
                [sys.executable, "-m", guardian.__name__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True, pass_fds=[held.fileno()], env=environment,
            )  # fmt: skip
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    with started:  # whose end closes its input, upon which it ends everything
        assert started.stdout is not None
        pids, until, count = started.stdout.readline().split(), time.monotonic() + START_S, 0
        while count < nodes:
            if time.monotonic() > until or not (pids and all(Path("/proc", pid.decode()).exists() for pid in pids)):
                said = [
                    line for each in (*sorted(folder.glob("daemon[01].txt")), *folder.glob("slurmctld.log"))
                    for line in each.read_text(errors="replace").splitlines()[-50:]
                ]  # fmt: skip
                words = [line for line in said if "error" in line.lower() or "fatal" in line.lower()] or said
                last = " / ".join(words[-3:]) or "it said nothing"
                raise ForetraceError(f"the private {engine} got {count} of its {nodes} nodes ready: {last}.")
            time.sleep(0.2)
            with suppress(ForetraceError, OSError):
                count = ready(folder, ports)
        yield folder


def _ports(count: int) -> tuple[socket.socket, list[int]]:
    """Return a socket that holds a block of ports, and those of the block that are for the daemons."""
    starts = range(_FIRST_PORT, _LAST_PORT - _BLOCK, _BLOCK)
    for first in secrets.SystemRandom().sample(starts, len(starts)):
        ports = list(range(first + 1, first + 1 + count))
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", first))
            held.listen(1)
            for port in ports:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        return held, ports
    raise ForetraceError(f"no {count} ports in a row are free on this machine; end what uses them.")


def _write(setup: SlurmSetup, folder: Path, ports: Sequence[int]) -> tuple[list[str], Mapping[str, str]]:
    """Fill the folder: configuration, key, stand-ins for devices; lines that become daemons and their environment."""
    names = [setup.node(at) for at in range(setup.nodes)]
    step = len(f"{folder}/spool/{names[0]}/{names[0]}_{10**7}.{2**32 - 1}")
    if step >= _SOCKET:  # steps of jobs could not be reached, and no job would ever start
        raise ForetraceError(
            f"the folder of a private Slurm must have at most {len(str(folder)) + _SOCKET - 1 - step} characters, got "
            f"{folder}; set TMPDIR to a folder with a shorter name, as /tmp."
        )
    for each in ("state", "spool"):
        (folder / each).mkdir()
    for at in range(setup.gpus):
        (folder / f"gpu{at}").symlink_to("/dev/null")  # Slurm wants a file per GPU; it is never opened
    size = setup.nodes // setup.racks
    said = {
        "host": socket.gethostname().split(".")[0], "folder": folder, "port": ports[0], "database_port": ports[-1],
        "scheduler": "backfill" if setup.backfill else "builtin", "nodes": setup.listed(0, setup.nodes - 1),
        "gpus": setup.gpus, "first_port": ports[1], "last_port": ports[setup.nodes], "last_gpu": setup.gpus - 1,
        "racks": "\n".join(
            f"SwitchName=rack{at} Nodes={setup.listed(at * size, (at + 1) * size - 1)}" for at in range(setup.racks)
        ),
        "last_rack": setup.racks - 1,
    }  # fmt: skip

    def filled(name: str) -> str:
        return Template(files(__package__).joinpath(name).read_text()).substitute(said)

    given = ",".join(name if value is None else f"{name}={value}" for name, value in setup.parameters.items())
    lines = [*setup.lines, f"SchedulerParameters={given}" * bool(given)]
    if not any(line.startswith("PriorityType=") for line in lines):
        lines.append("PriorityType=priority/basic")
    if setup.accounting:
        lines.append(filled("accounting.conf"))
        folder.chmod(0o711)  # jobs of other users are started from below it; keys and settings are root's alone
    said["lines"] = "\n".join(lines)
    texts = {name: filled(name) for name in ("slurm.conf", "slurmdbd.conf", "topology.conf", "gres.conf")}
    for name, text in ({"munge.key": secrets.token_hex(64)} | texts).items():
        (folder / name).touch(mode=0o600 if name in ("munge.key", "slurmdbd.conf") else 0o644)
        (folder / name).write_text(text)
    daemons = filled("accounting.daemons" if setup.accounting else "slurm.daemons").splitlines()
    nodes = [f"exec slurmd -D -f {folder}/slurm.conf -N {name}" for name in names]
    return [*daemons, *nodes], PrivateSlurm(setup, folder).environment
