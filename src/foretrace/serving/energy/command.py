"""`CommandEnvironment`: a command whose energy and time are measured here, at settings of the machine and its own.

A knob that the command names in braces, as in `python bench.py --batch {batch}`, is put there; all others are settings
of the machine. The command has to do the same work at every setting, so that energy and time can be compared.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from foretrace.cost.operators import store
from foretrace.errors import ForetraceError, refused
from foretrace.names import question
from foretrace.serving.energy import machine, nvml
from foretrace.serving.energy.machine import SYSFS, Meter, Setter, beyond, held, recover
from foretrace.serving.energy.tune import EnergyUse, Knob, Setting, TunedEnvironment

_LOOK_S = 60.0  # between readings of counters: those of a processor overflow after some minutes at full power
_CPU_KNOBS = {"cpu-frequency": machine.cpu_frequency, "cpu-power-limit": machine.cpu_power_limit}


@dataclass(frozen=True, kw_only=True)
class CommandEnvironment(TunedEnvironment):
    """A command, and what can be set around it; its name is how it was written."""

    command: tuple[str, ...]
    setters: Mapping[str, Setter]  # of the knobs that are the machine's
    meters: tuple[Meter, ...]

    def measure(self, setting: Setting) -> EnergyUse:
        """Set what is to be set, and run the command. Raises ForetraceError where it fails or nothing is metered."""
        if not self.meters:
            raise ForetraceError(
                "this machine has no energy counter that can be read, neither of its processor (RAPL in "
                "/sys/class/powercap) nor of a GPU (NVML); tune a recorded environment, or run on the bare machine."
            )
        values = self.named(setting)
        for name, setter in self.setters.items():
            setter.set(values[name])
        words = [_filled(word, values) for word in self.command]
        energy_j, last = 0.0, [meter.read() for meter in self.meters]

        def count() -> None:
            nonlocal energy_j, last
            before, last = last, [meter.read() for meter in self.meters]
            energy_j += sum(meter.between(a, b) for meter, a, b in zip(self.meters, before, last, strict=True))

        began = perf_counter()
        _run(words, count)
        time_s = perf_counter() - began
        count()
        if not energy_j > 0:
            raise ForetraceError(f"{self.name} took less energy than the counter tells; give it more work.")
        return EnergyUse(energy_j, time_s)

    @contextmanager
    def restored(self, journal: Path, root: Path = SYSFS) -> Iterator[None]:
        """Restore the settings of the machine afterwards."""
        if not self.setters:
            yield
            return
        with held(tuple(self.setters.values()), journal, lambda name: setter(name, root)):
            yield


def environment(
    command: Sequence[str], values: Mapping[str, tuple[float, ...]], *, root: Path = SYSFS
) -> CommandEnvironment:
    """Return a command with these knobs; no values stand for all levels of the device.

    The command's own knobs begin at their first value, the machine's at what they are set to. Raises ForetraceError
    for what cannot be set, and for values out of its limits.
    """
    setters, knobs = {}, []
    for name, given in values.items():
        if any("{" + name + "}" in word for word in command):
            if not given or min(given) <= 0:
                raise ForetraceError(f"`set={name}` needs values above 0, as in {name}=1,2,4.")
            knobs.append(Knob(name=name, unit="", levels=tuple(sorted(set(given))), default=given[0]))
            continue
        setters[name] = found = setter(name, root)
        if wrong := [value for value in given if not found.low <= value <= found.high]:
            raise beyond(found, wrong[0])
        now = found.now()
        knobs.append(
            Knob(name=name, unit=found.unit, levels=tuple(sorted({*(given or found.levels), now})), default=now)
        )
    if not knobs:
        raise ForetraceError(
            f"`set=` must say what may be changed: a word that the command has in braces, or "
            f"{', '.join((*_CPU_KNOBS, *nvml.GPU_KNOBS))}."
        )
    return CommandEnvironment(
        name=" ".join(command), command=tuple(command), knobs=tuple(knobs), setters=setters, meters=meters(root)
    )


def journal(root: Path = SYSFS) -> Path:
    """Return where settings are noted while they are changed; what a killed process left changed is restored now."""
    store.make_folder(store.cache())
    path = store.cache() / "settings.json"
    recover(path, lambda name: setter(name, root))
    return path


def setter(name: str, root: Path = SYSFS) -> Setter:
    """Return a setting of this machine by its name. Raises ForetraceError where it does not offer that."""
    if name in nvml.GPU_KNOBS:
        return nvml.gpu_setter(nvml.library(), name)
    if name not in _CPU_KNOBS:
        known = (*_CPU_KNOBS, *nvml.GPU_KNOBS)
        raise ForetraceError(f"`set={name}` is no setting, nor has the command it in braces; {question(name, known)}")
    found = _CPU_KNOBS[name](root)
    if found is None:
        raise ForetraceError(f"this machine offers no {name} under {root}; tune something else, or on another machine.")
    return found


def meters(root: Path = SYSFS) -> tuple[Meter, ...]:
    """Return all counters of energy that this machine has."""
    found = (machine.rapl_meter(root), nvml.gpu_meter())
    return tuple(each for each in found if each is not None)


def _filled(word: str, values: Mapping[str, float]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", f"{value:g}")
    return word


def _run(words: Sequence[str], meanwhile: Callable[[], None]) -> None:
    """Run a command, and `meanwhile` every `_LOOK_S`; where we are interrupted, the command is killed.

    Raises ForetraceError where it fails.
    """
    with refused(f"cannot run {words[0]}", "give a command"):
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with running:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    _, errors = running.communicate(timeout=_LOOK_S)
                    break
                meanwhile()
        except BaseException:
            running.kill()
            raise
    if running.returncode:
        said = errors.decode("utf-8", errors="replace").strip().splitlines()
        why = said[-1] if said else "it said nothing"
        raise ForetraceError(f"{' '.join(words)} ended with code {running.returncode}: {why}.")
