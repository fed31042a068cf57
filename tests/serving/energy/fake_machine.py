"""A tree as Linux has it under /sys; run as a script, this holds changed settings in it until it is ended."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from foretrace.serving.energy.command import setter
from foretrace.serving.energy.machine import held

FREQUENCIES = (800_000, 1_200_000, 1_600_000, 2_400_000)


def make(root: Path) -> Path:
    """Two cores with cpufreq, two packages with RAPL, and zones that must not be counted."""
    for core in range(2):
        policy = root / f"devices/system/cpu/cpufreq/policy{core}"
        policy.mkdir(parents=True)
        (policy / "cpuinfo_min_freq").write_text("800000\n")
        (policy / "cpuinfo_max_freq").write_text("2400000\n")
        (policy / "scaling_available_frequencies").write_text(" ".join(map(str, FREQUENCIES)) + " \n")
        (policy / "scaling_max_freq").write_text("2400000\n" if core else "1600000\n")
    names = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core", "intel-rapl:2": "psys"}
    for zone, name in names.items():
        folder = root / "class/powercap" / zone
        folder.mkdir(parents=True)
        for file, text in {
            "name": name, "energy_uj": "5000000", "max_energy_range_uj": "262143328850",
            "constraint_0_power_limit_uw": "100000000", "constraint_0_max_power_uw": "125000000",
        }.items():  # fmt: skip
            (folder / file).write_text(f"{text}\n")
    return root


def settings(root: Path) -> dict[str, str]:
    """All that can be written, by file."""
    files = sorted([*root.rglob("scaling_max_freq"), *root.rglob("constraint_0_power_limit_uw")])
    return {str(file): file.read_text().strip() for file in files}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
    tree, journal = Path(sys.argv[1]), Path(sys.argv[2])
    setters = [setter(name, tree) for name in ("cpu-frequency", "cpu-power-limit")]
    with held(setters, journal, lambda name: setter(name, tree)):
        setters[0].set(800)
        setters[1].set(50)
        print("changed", flush=True)
        time.sleep(60)
