"""A private Slurm: a controller and a daemon per virtual node on loopback, in a folder of its own.

`private` starts one and ends it with the block. A guardian process owns all daemons (`guardian`), so that nothing stays
behind however the block ends. Ports come from blocks that a running cluster holds by listening on the first port of
each, so two never meet. A Slurm that is installed and configured on this machine is neither read nor touched.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import msgspec

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.rig import guardian

ACCOUNTING = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr")  # where there is any
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
MOST_NODES = 512  # 4 MB each; more would be a load test of this machine
START_S, COMMAND_S = 90.0, 60.0
PARTITION = "all"
_BLOCK, _FIRST_PORT, _LAST_PORT = 256, 10240, 32768  # below the ports that the kernel gives out by itself
_SOCKET = 108  # bytes of the path of a Unix socket, with the one that ends it
_SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin:/sbin"


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
    """A Slurm that runs. `environment` is what its commands need; `run` calls one."""

    def __init__(self, setup: SlurmSetup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        known = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {**known, "SLURM_CONF": str(folder / "slurm.conf"), "SLURM_TIME_FORMAT": "%s"}
        if setup.accounting:
            self.environment |= {
                "SLURMDBD_CONF": str(folder / "slurmdbd.conf"),
                "MYSQL_UNIX_PORT": str(folder / "db.s"),
            }

    @property
    def completed(self) -> Path:
        """The file of jobcomp/filetxt: a line per job that ended."""
        return self.folder / "completed"

    def run(self, program: str, *words: str, text: str | None = None) -> str:
        """Return what a command of Slurm says. Raises ForetraceError with its complaint where it fails."""
        try:
            done = subprocess.run(
                [_program(program) or program, *words], env=self.environment, input=text, text=True,
                capture_output=True, timeout=COMMAND_S, cwd=self.folder, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ForetraceError(f"the private Slurm gave {program} no answer within {COMMAND_S:.0f} s.") from None
        if done.returncode:
            said = " / ".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}"
            raise ForetraceError(f"the private Slurm refused {program} {' '.join(words)[:200]}: {said}.")
        return done.stdout

    def set_state(self, nodes: str, state: str) -> None:
        """Take nodes DOWN as an operator does (their jobs go back to the queue), DRAIN or RESUME them."""
        self.run("scontrol", "update", f"NodeName={nodes}", f"State={state}", "Reason=rig")

    def reserve(self, nodes: str, begin_s: float, end_s: float) -> None:
        """Reserve nodes for maintenance from one Unix time to another; who runs there runs on."""
        times = (begin_s, min(end_s, begin_s + 10**7))
        begin, end = (datetime.fromtimestamp(each).isoformat(timespec="seconds") for each in times)
        self.run(
            "scontrol", "create", "reservation", f"StartTime={begin}", f"EndTime={end}", f"Nodes={nodes}", "Users=root",
            "Flags=MAINT,IGNORE_JOBS",
        )  # fmt: skip


def missing(*, accounting: bool = False) -> str:
    """Return why this machine can have no private Slurm, or none with accounting, one sentence; "" where it can."""
    for names, what, packages in (
        (PROGRAMS, "Slurm", PACKAGES),
        (ACCOUNTING, "The accounting of Slurm", ACCOUNTING_PACKAGES),
    ):
        lacks = [name for name in names if _program(name) is None and (accounting or names is PROGRAMS)]
        if lacks:
            return f"{what} is not installed here ({lacks[0]} is missing); install it with: apt-get install {packages}."
    if os.geteuid() != 0:
        return "a private Slurm starts its node daemons as root; run this as root, in a container for example."
    return ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}")


@contextmanager
def private(setup: SlurmSetup, *, under: Path | None = None) -> Iterator[PrivateSlurm]:
    """Start a Slurm of this kind, ready for jobs; ended with the block, its folder (made below `under`) removed.

    Raises ForetraceError where Slurm is not installed or does not start.
    """
    setup.validate()
    lacks = missing(accounting=bool(setup.accounting))
    if lacks:
        raise ForetraceError(lacks)
    with guarded("ft-slurm-", setup.nodes + 3, lambda folder, ports: _write(PrivateSlurm(setup, folder), ports),
                 under=under) as (folder, _, pids):  # fmt: skip
        made = PrivateSlurm(setup, folder)
        _wait(made, pids)
        for words in setup.accounting:
            made.run("sacctmgr", "-i", *words.split())
        yield made


@contextmanager
def guarded(
    prefix: str, ports: int, write: Callable[[Path, Sequence[int]], tuple[list[list[str]], Mapping[str, str]]], *,
    under: Path | None = None,
) -> Iterator[tuple[Path, list[int], list[int]]]:  # fmt: skip
    """(folder, ports, process numbers) of daemons that a guardian owns: all end with the block, and with us.

    ports: how many they need; write: fills the folder, given the ports, and says their commands and environment.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=under))
    with ExitStack() as stack:
        try:
            held, first = _ports(ports)
            with ExitStack() as ours:
                for each in held:
                    ours.enter_context(each)
                free = [port for port in range(first + 1, first + 2 * ports + 2) if (port - first) % _BLOCK][:ports]
                commands, environment = write(folder, free)
                (folder / guardian.DAEMONS).write_bytes(msgspec.json.encode(commands))
                started = subprocess.Popen(
                    [sys.executable, guardian.__file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    start_new_session=True, pass_fds=[each.fileno() for each in held], env=environment,
                )  # fmt: skip
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        stack.callback(_end, started)
        assert started.stdout is not None
        yield folder, free, msgspec.json.decode(started.stdout.readline() or b"[]", type=list[int])


def _end(started: subprocess.Popen[bytes]) -> None:
    """Let the guardian end everything, and wait for that."""
    assert started.stdin is not None and started.stdout is not None
    with suppress(BrokenPipeError):
        started.stdin.close()
    started.wait()
    started.stdout.close()


def _ports(count: int) -> tuple[list[socket.socket], int]:
    """Return sockets that hold blocks of ports that nobody uses, and the first port that is free for the daemons."""
    blocks = -(-(count + 1) // (_BLOCK - 1))
    starts = range(_FIRST_PORT, _LAST_PORT - blocks * _BLOCK, _BLOCK)
    offset = secrets.randbelow(len(starts))
    for first in (*starts[offset:], *starts[:offset]):
        with ExitStack() as stack:
            try:
                for port in range(first, first + blocks * _BLOCK):
                    one = socket.socket()
                    stack.enter_context(one)
                    one.bind(("127.0.0.1", port))
            except OSError:
                continue
        held = []
        try:
            for block in range(blocks):
                one = socket.socket()
                held.append(one)
                one.bind(("127.0.0.1", first + block * _BLOCK))
                one.listen(1)
        except OSError:  # another one took the block in between
            for one in held:
                one.close()
            continue
        return held, first
    raise ForetraceError(f"no {count} ports in a row are free on this machine; end what uses them.")


def _write(made: PrivateSlurm, ports: Sequence[int]) -> tuple[list[list[str]], Mapping[str, str]]:
    """Fill the folder: configuration, key, stand-ins for devices; commands of the daemons and their environment."""
    setup, folder = made.setup, made.folder
    host = socket.gethostname().split(".")[0]
    (folder / "state").mkdir()
    step = len(f"{folder}/spool/{setup.node(0)}/{setup.node(0)}_{10**7}.{2**32 - 1}")
    if step >= _SOCKET:  # steps of jobs could not be reached, and no job would ever start
        raise ForetraceError(
            f"the folder of a private Slurm must have at most {len(str(folder)) + _SOCKET - 1 - step} characters, got "
            f"{folder}; set TMPDIR to a folder with a shorter name, as /tmp."
        )
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    for at in range(setup.gpus):
        (folder / f"gpu{at}").symlink_to("/dev/null")  # Slurm wants a file per GPU; it is never opened
    (folder / "gres.conf").write_text(
        f"Name=gpu File={folder}/{'gpu0' if setup.gpus == 1 else f'gpu[0-{setup.gpus - 1}]'}\n"
    )
    size = setup.nodes // setup.racks
    names = [setup.node(at) for at in range(setup.nodes)]
    leaves = (f"SwitchName=rack{at} Nodes={setup.listed(at * size, (at + 1) * size - 1)}" for at in range(setup.racks))
    top = f"SwitchName=top Switches=rack[0-{setup.racks - 1}]"
    (folder / "topology.conf").write_text("\n".join([*leaves, top]) + "\n")
    parameters = ",".join(name if value is None else f"{name}={value}" for name, value in setup.parameters.items())
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[at + 1]} CPUs={setup.gpus} "
        f"RealMemory=1000 Gres=gpu:{setup.gpus} State=UNKNOWN"
        for at, name in enumerate(names)
    ]
    accounting = _account(made, ports[setup.nodes + 1]) if setup.accounting else ""
    text = f"""ClusterName=foretrace
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldDebug=debug
LogTimeFormat=iso8601_ms
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
SchedulerType=sched/{"backfill" if setup.backfill else "builtin"}
{f"SchedulerParameters={parameters}" if parameters else ""}
{"" if any(line.startswith("PriorityType=") for line in setup.lines) else "PriorityType=priority/basic"}
JobCompType=jobcomp/filetxt
JobCompLoc={made.completed}
{accounting}
ReturnToService=1
SlurmdTimeout=3600
SlurmctldTimeout=3600
MessageTimeout=60
KillWait=1
{chr(10).join(setup.lines)}
{chr(10).join(nodes)}
PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
    (folder / "slurm.conf").write_text(text)
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    conf = str(folder / "slurm.conf")
    daemons = [[str(_program("munged")), "--foreground", "--force", f"--key-file={key}", *munge]]
    controller = [str(_program("slurmctld")), "-D", "-f", conf]
    if setup.accounting:
        dbd = f"until [ -S {folder}/db.s ]; do sleep 0.1; done; exec {_program('slurmdbd')} -D"
        data = ["--no-defaults", f"--datadir={folder}/db", f"--socket={folder}/db.s", f"--pid-file={folder}/db.pid"]
        small = ["--skip-networking", "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0"]
        # made by a process of the guardian, which ends it and the folder at any time
        plain = f"--no-defaults --datadir={folder}/db --user=root --skip-test-db"
        made_ = f"{_program('mariadb-install-db')} {plain} --auth-root-authentication-method=normal"
        serve = " ".join([str(_program("mariadbd")), *data, *small, "--user=root"])
        daemons += [["/bin/sh", "-c", f"{made_} && exec {serve}"], ["/bin/sh", "-c", dbd]]
        known = f"until {_program('sacctmgr')} -i add cluster foretrace; do sleep 0.2; done"
        controller = ["/bin/sh", "-c", f"{known}; exec {' '.join(controller)}"]
    daemons += [controller]
    daemons += [[str(_program("slurmd")), "-D", "-f", conf, "-N", name] for name in names]
    return daemons, made.environment


def _account(made: PrivateSlurm, port: int) -> str:
    """Return settings of a database below the folder; its lines of slurm.conf."""
    folder = made.folder
    folder.chmod(0o711)  # jobs of other users are started from below it; keys and settings are root's alone
    settings = folder / "slurmdbd.conf"
    settings.touch(mode=0o600)
    settings.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nDbdHost=localhost\nDbdAddr=127.0.0.1\n"
        f"DbdPort={port}\nSlurmUser=root\nStorageType=accounting_storage/mysql\nStorageHost=localhost\n"
        f"StorageUser=root\nStorageLoc=slurm\nLogFile={folder}/slurmdbd.log\nPidFile={folder}/slurmdbd.pid\n"
    )
    return (
        "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
        f"AccountingStoragePass={folder}/munge.socket\nAccountingStoragePort={port}\n"
        "AccountingStorageEnforce=associations,limits,qos\nAccountingStorageTRES=gres/gpu"
    )


def _wait(made: PrivateSlurm, pids: Sequence[int]) -> None:
    """Wait until all nodes are idle. Raises ForetraceError with the controller's last words otherwise."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and pids and all(Path(f"/proc/{pid}").exists() for pid in pids):
        with suppress(ForetraceError):
            idle = made.run("sinfo", "--noheader", "--states=idle", "--format=%D").split()
            if sum(int(each) for each in idle) == made.setup.nodes:
                return
        time.sleep(0.2)
    files = (made.folder / name for name in ("slurmctld.log", "daemon1.txt", "daemon0.txt"))
    said = [line for each in files if each.exists() for line in each.read_text(errors="replace").splitlines()[-50:]]
    words = [line for line in said if "error" in line.lower() or "fatal" in line.lower()]
    last = " / ".join(words[-3:]) or "it said nothing"
    raise ForetraceError(f"the private Slurm did not get its {made.setup.nodes} nodes ready: {last}.")
