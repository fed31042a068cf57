"""Namespaces are made and removed, however a rig ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.links import netns
from foretrace.hardware.cluster import Link, parse_link

HOLDS_A_RIG = """
import sys, time
from foretrace.hardware.cluster import parse_link
from foretrace.experiment.links import netns
with netns.made(2, parse_link("100mbit")) as net:
    print("up", flush=True)
    time.sleep(600)
"""


def mine() -> list[str]:
    folder = Path("/var/run/netns")
    return [each.name for each in folder.iterdir() if f"-{os.getpid()}-" in each.name] if folder.is_dir() else []


def test_a_rig_is_made_as_stated_and_removed(able: netns.Capability) -> None:
    with netns.made(3, parse_link("300mbit")) as net:
        assert len(mine()) == 4  # three workers and the hub
        assert net.addresses == ("10.77.0.1", "10.77.0.2", "10.77.0.3")
        for name in net.namespaces:
            said = subprocess.check_output(["tc", "-n", name, "qdisc", "show", "dev", netns.INTERFACE], text=True)
            assert "tbf" in said and "300Mbit" in said
            reno = ["ip", "netns", "exec", name, "cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
            assert subprocess.check_output(reno, text=True).strip() == "reno"
    assert mine() == []


def test_a_failure_leaves_nothing(able: netns.Capability) -> None:
    with pytest.raises(ZeroDivisionError), netns.made(2, parse_link("1gbit")):
        raise ZeroDivisionError
    assert mine() == []


def test_one_rig_per_process(able: netns.Capability) -> None:
    with netns.made(2, parse_link("1gbit")):
        with pytest.raises(ForetraceError, match="has a rig already"), netns.made(2, parse_link("1gbit")):
            pass
        assert len(mine()) == 3  # the first one is still whole
        assert not set(netns.leftovers()) & set(mine())


def test_what_a_killed_rig_left_is_found_and_removed(able: netns.Capability) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_A_RIG], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "up\n"
        assert not any(f"-{holder.pid}-" in name for name in netns.leftovers())  # it lives
        stray = subprocess.Popen(["ip", "netns", "exec", _of(holder.pid)[-1], "sleep", "600"])
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    left = _of(holder.pid)
    assert len(left) == 3
    assert set(left) <= set(netns.leftovers())
    assert set(left) <= set(netns.clean())
    assert _of(holder.pid) == []
    assert stray.wait(timeout=100) == -signal.SIGKILL  # what ran inside has ended


def _of(pid: int) -> list[str]:
    return sorted(each.name for each in Path("/var/run/netns").iterdir() if f"-{pid}-" in each.name)


def test_the_bucket_follows_the_rate() -> None:
    sizes = [netns.burst_bytes(Link(name="", gbit_s=gbit)) // 1024 for gbit in (1.0, 0.5, 0.3, 0.2, 0.1, 0.01)]
    assert sizes == [256, 128, 64, 64, 32, 32]
    assert netns.burst_bytes(Link(name="", gbit_s=10.0)) == 2560 * 1024


@pytest.mark.parametrize("gbit_s", [0.0, 1e-6, 50.0, float("nan"), float("inf"), -1.0])
def test_links_that_cannot_be_shaped_are_refused(gbit_s: float) -> None:
    with pytest.raises(ForetraceError, match="cannot be shaped"):
        netns.check_link(Link(name="", gbit_s=gbit_s))


@pytest.mark.parametrize("workers", [-1, 0, 1, 65])
def test_a_rig_has_at_least_two_workers(workers: int) -> None:
    with pytest.raises(ForetraceError, match="make no rig"), netns.made(workers, parse_link("1gbit")):
        pass


def test_a_latency_needs_netem(able: netns.Capability) -> None:
    if able.delay:
        pytest.skip("this kernel has netem")
    with pytest.raises(ForetraceError, match="netem"), netns.made(2, parse_link("1gbit/1ms")):
        pass


def test_without_the_tools_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ForetraceError, match="the command ip is not there"):
        netns.require()


def test_without_the_capability_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(netns, "_text", lambda path: "CapEff:\t0000000000000000")
    with pytest.raises(ForetraceError, match="CAP_NET_ADMIN"):
        netns.require()


def test_links_to_a_server_are_shaped_in_both_directions_and_unshaped_for_a_while(able: netns.Capability) -> None:
    with netns.made(2, parse_link("300mbit"), servers=1) as net:
        assert len(net.namespaces) == 3 and len(net.shaped) == 4

        def shaped(name: str, device: str) -> bool:
            return "tbf" in subprocess.check_output(["tc", "-n", name, "qdisc", "show", "dev", device], text=True)

        assert all(shaped(*each) for each in net.shaped) and not shaped(net.namespaces[2], netns.INTERFACE)
        with netns.unshaped(net):
            assert not any(shaped(*each) for each in net.shaped)
        assert all(shaped(*each) for each in net.shaped)
    with (
        pytest.raises(ForetraceError, match="rate alone"),
        netns.made(2, Link(name="far", gbit_s=1, latency_us=5), servers=1),
    ):
        pass
