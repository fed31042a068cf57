"""Workers and their own networks: one namespace per worker, joined by a bridge, each interface shaped to a stated rate.

Everything lies in namespaces of ours, the bridge too (in the hub), so the machine's own network is not touched and
whatever is left over goes away with the namespaces. Their names hold the process that made them
(`ftrig-PID-START-hub`, `ftrig-PID-START-w0`, START being its start time): what a killed rig left is known by its dead
process, and removed by the next rig or by `clean`.

Each worker sends through a token bucket (`tbf`), which receivers feel as the same rate. TCP runs with reno: bbr takes
a shaped link for a lossy one and reaches a third to two thirds of its rate. Packets are segmented late (GSO), and one
that is larger than the token bucket would be cut by it, with a timer for every piece: at 300 Mbit/s the interrupts took
a third of the cores. So interfaces hand over half a bucket at most.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.experiment.processes import Workers, join, started
from foretrace.hardware.cluster import Link

PREFIX = "ftrig"
INTERFACE = "eth0"  # of every worker
PORT = 29_500  # in the first worker's own namespace, so nothing else can have it
CONGESTION = "reno"
MOST_WORKERS = 64
LEAST_MBIT, MOST_MBIT = 1.0, 10_000.0
TRUSTED_MBIT = 1_000.0  # faster links are bound by the processor, not by the token bucket
_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-(?P<what>hub|probe|w\d+)")
_LATENCY_MS = 50  # how long a packet may wait for tokens before it is dropped
_TIMEOUT_S = 20.0  # of one command
_GOODBYE_S = 5.0  # for processes of a removed namespace
_GSO_BYTES = 65_536  # of a packet that is segmented late, as Linux has it
_NETEM_PACKETS = 100_000  # the default queue of 1,000 would drop packets on a long link


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Namespaces of one rig, worker by worker, and the addresses they have on its bridge."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    link: Link
    shaped: tuple[tuple[str, str], ...] = ()  # namespace and interface of every token bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What this machine can do for a rig; `missing` says in one sentence each what it lacks."""

    missing: tuple[str, ...]
    delay: bool  # whether netem is there, so that a link can have a latency


def burst_bytes(link: Link) -> int:
    """Return the size of the token bucket: large enough for the rate, small enough not to be felt.

    As measured with gloo and reno: 256 KB at 1 Gbit/s, 128 at 500 Mbit/s, 64 at 200 to 300, 32 at 100 and below.
    """
    mbit = 1e3 * link.gbit_s
    for least, kilobytes in ((750.0, 256), (400.0, 128), (150.0, 64)):
        if mbit >= least:
            return kilobytes * 1024 if mbit <= TRUSTED_MBIT else int(kilobytes * 1024 * mbit / TRUSTED_MBIT)
    return 32 * 1024


def probe() -> Capability:
    """Find out what is missing by trying: a namespace, a veth pair, a token bucket, a delay, all removed again."""
    if missing := _missing_tools():
        return Capability(missing=missing, delay=False)
    name = f"{_mine()}-probe"
    found: list[str] = []
    delay = False
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", "peer0")
        _ip("-n", name, "link", "add", "bridge0", "type", "bridge")
        try:
            _shape(name, Link(name="probe", gbit_s=0.1))
            _whole_packets(name, Link(name="probe", gbit_s=0.1))
        except ForetraceError as error:
            found.append(f"the kernel has no token bucket (tbf), or packets of any size: {error}")
        try:
            _congestion(name)
        except ForetraceError as error:
            allowed = _text("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
            found.append(f"TCP cannot be set to {CONGESTION} ({error}); allowed here: {allowed}")
        with suppress(ForetraceError):
            _tc("-n", name, "qdisc", "replace", "dev", "peer0", "root", "netem", "delay", "1ms")
            delay = True
    except ForetraceError as error:
        found.append(f"network namespaces cannot be made: {error}")
    finally:
        _remove([name])
    return Capability(missing=tuple(found), delay=delay)


def require() -> Capability:
    """Return the machine's capability; raises ForetraceError saying what a rig lacks here."""
    found = probe()
    if found.missing:
        raise ForetraceError(f"no rig on this machine: {'; '.join(found.missing)}.")
    return found


def check_link(link: Link) -> None:
    """Raise ForetraceError for a link that the rig cannot make."""
    mbit = 1e3 * link.gbit_s
    if not LEAST_MBIT <= mbit <= MOST_MBIT:
        raise ForetraceError(
            f"a link of {mbit:g} Mbit/s cannot be shaped here; give one from {LEAST_MBIT:g} Mbit/s to "
            f"{MOST_MBIT / 1e3:g} Gbit/s, and trust it up to {TRUSTED_MBIT / 1e3:g} Gbit/s."
        )


def check_workers(workers: int) -> None:
    """Raise ForetraceError for a number of workers that makes no rig."""
    if not 2 <= workers <= MOST_WORKERS:
        raise ForetraceError(f"{workers} workers make no rig; give a number from 2 to {MOST_WORKERS}.")


@contextmanager
def made(workers: int, link: Link, *, servers: int = 0) -> Iterator[Net]:
    """Make so many namespaces joined by `link`, removed again however the block ends.

    `servers` more come behind them, whose own interface is as fast as the machine: then each worker's is shaped in both
    directions, so that what a server sends it passes its link, too.
    Raises ForetraceError where the machine lacks something, or for a link or a number of workers that cannot be.
    """
    check_workers(workers + servers)
    check_link(link)
    able = require()
    if link.latency_s and servers:
        raise ForetraceError(f"a link to a server has a rate alone here, no {link.latency_us:g} us; leave them out.")
    if link.latency_s and not able.delay:
        raise ForetraceError(
            f"a latency of {link.latency_us:g} us needs netem, which this kernel lacks; give the rate alone."
        )
    clean()
    base = _mine()
    hub = f"{base}-hub"
    if hub in _namespaces():
        raise ForetraceError("this process has a rig already; end it before it makes another one.")
    names = tuple(f"{base}-w{i}" for i in range(workers + servers))
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        addresses = tuple(
            _join(hub, name, number, link, server=number >= workers, both=servers > 0)
            for number, name in enumerate(names)
        )
        shaped = [(name, INTERFACE) for name in names[:workers]]
        shaped += [(hub, f"port{number}") for number in range(workers)] if servers else []
        yield Net(namespaces=names, addresses=addresses, link=link, shaped=tuple(shaped))
    finally:
        _remove([*names, hub])


@contextmanager
def running(net: Net, *, threads: int = 1) -> Iterator[Workers]:
    """Run one worker in every namespace, joined over gloo; ended with the block.

    Raises ForetraceError where they do not come up.
    """
    with inside(net, threads=threads) as workers:
        join(workers, net.addresses[0], PORT, threads)
        yield workers


@contextmanager
def inside(net: Net, *, threads: int = 1) -> Iterator[Workers]:
    """Run one process in every namespace, which has joined no other; ended with the block."""
    with started(net.namespaces, threads, interface=INTERFACE) as workers:
        yield workers


@contextmanager
def unshaped(net: Net) -> Iterator[None]:
    """Let the links of a rig be as fast as the machine meanwhile. Raises ForetraceError."""
    for name, device in net.shaped:
        _tc("-n", name, "qdisc", "del", "dev", device, "root")
    yield
    for name, device in net.shaped:
        _shape(name, net.link, device)


def leftovers() -> tuple[str, ...]:
    """Return namespaces of rigs whose process is gone, sorted."""
    found = (_NAME.fullmatch(each) for each in _namespaces())
    return tuple(sorted(each.group() for each in found if each and _start_time(int(each["pid"])) != int(each["start"])))


def clean() -> tuple[str, ...]:
    """Remove what killed rigs left behind, processes in their namespaces included; what was removed."""
    found = leftovers()
    _remove(found)
    return found


def _join(hub: str, name: str, number: int, link: Link, *, server: bool, both: bool) -> str:
    """Return a namespace with its end of a veth pair, a worker's shaped (in `both` directions) to a link; its
    address.
    """
    address, port = f"10.77.0.{number + 1}", f"port{number}"
    _ip("netns", "add", name)
    _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
    _whole_packets(name, link)
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _congestion(name)
    if server:
        return address
    _shape(name, link)
    if both:
        _shape(hub, link, port)
    if link.latency_s:  # on the way to the worker, so that the token bucket stays what it was measured to be
        delay = f"{link.latency_us:g}us"
        _tc(
            *("-n", hub, "qdisc", "replace", "dev", port, "root"),
            *("netem", "limit", str(_NETEM_PACKETS), "delay", delay),
        )
    return address


def _shape(name: str, link: Link, device: str = INTERFACE) -> None:
    rate, burst = f"{round(1e6 * link.gbit_s)}kbit", f"{burst_bytes(link)}b"
    _tc(
        *("-n", name, "qdisc", "replace", "dev", device, "root"),
        *("tbf", "rate", rate, "burst", burst, "latency", f"{_LATENCY_MS}ms"),
    )


def _whole_packets(name: str, link: Link) -> None:
    """Let no packet be larger than half the token bucket; connections take that over when they are made."""
    _ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(min(burst_bytes(link) // 2, _GSO_BYTES)))


def _congestion(name: str) -> None:
    file = "/proc/sys/net/ipv4/tcp_congestion_control"
    _ip("netns", "exec", name, "sh", "-c", f"echo {CONGESTION} > {file}")


def _remove(names: Sequence[str]) -> None:
    """End what runs in these namespaces, then remove them; those that are not there are passed over."""
    there = [name for name in names if name in _namespaces()]
    for name in there:
        _end_processes(name)
    for name in there:
        with suppress(ForetraceError):  # gone meanwhile
            _ip("netns", "del", name)
    if left := [name for name in there if name in _namespaces()]:
        raise ForetraceError(f"{', '.join(left)} could not be removed; try: ip netns del {left[0]}.")


def _end_processes(name: str) -> None:
    """End every process of a namespace of ours: it holds nothing else."""
    end = time.monotonic() + _GOODBYE_S
    while time.monotonic() < end:
        pids = [int(word) for word in _said(["ip", "netns", "pids", name]).split()]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _namespaces() -> tuple[str, ...]:
    """Return names of all network namespaces that `ip netns` knows; none where it has never made one."""
    folder = Path("/var/run/netns")
    return tuple(sorted(each.name for each in folder.iterdir())) if folder.is_dir() else ()


def _mine() -> str:
    """Return the beginning of every name of this process's rig."""
    return f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}"


def _start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where there is none of this number."""
    stat = _text(f"/proc/{pid}/stat")
    return int(stat.rpartition(")")[2].split()[19]) if stat else 0  # field 22 of proc(5); 2 is "(name)"


def _missing_tools() -> tuple[str, ...]:
    """Return what is missing before anything is tried."""
    missing = [f"the command {name} is not there (package iproute2)" for name in ("ip", "tc") if not shutil.which(name)]
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", _text("/proc/self/status"), re.MULTILINE)
    if capabilities is None:
        return ("network namespaces need Linux",)
    held = int(capabilities[1], 16)
    for bit, name in ((12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")):
        if not held >> bit & 1:
            missing.append(f"this process lacks {name} (run it as root, or give the container this capability)")
    return tuple(missing)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _ip(*words: str) -> None:
    _said(["ip", *words])


def _tc(*words: str) -> None:
    _said(["tc", *words])


def _said(command: Sequence[str]) -> str:
    """Return what a command printed; raises ForetraceError with its own words where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ForetraceError(f"{' '.join(command)} did not end within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ForetraceError(f"{' '.join(command)}: {said}")
    return done.stdout
