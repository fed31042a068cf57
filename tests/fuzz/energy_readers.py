"""Readers of recorded energy, of journals of settings, and of what a kernel says of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.reader import Figure, Reader

DATA = Path(__file__).resolve().parents[1] / "data"


def energy_readers() -> Iterator[Reader]:
    """All of them."""
    zeus = {file.name: file.read_bytes() for file in sorted((DATA / "energy").glob("*.csv"))}
    yield Reader(name="zeus", covers=("serving.energy.recorded",), samples=lambda: zeus, play=_play_zeus)
    settings = {"settings.json": b'{"cpu-frequency": {"scaling_max_freq": "1600000"}}', "energy_uj": b"5000000\n"}
    covers = ("serving.energy.machine",)
    yield Reader(name="settings", covers=covers, samples=lambda: settings, play=_play_settings)


def _play_zeus(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.report import energy
    from foretrace.serving.energy import recorded
    from foretrace.serving.energy.tune import tune

    for whole in (DATA / "energy").glob("*.csv"):
        if whole.name != path.name:
            path.with_name(whole.name).write_bytes(whole.read_bytes())
    found = recorded.read([f"zeus:{path.parent}", "workload=squad", *(["target=84"] if way & 1 else [])])
    yield "tuned", energy.tuned(tune(found, "1.1x", evaluations=4), slo="1.1x")


def _play_settings(path: Path, way: int) -> Iterator[Figure]:
    from tempfile import TemporaryDirectory

    from foretrace.serving.energy.command import setter
    from foretrace.serving.energy.machine import rapl_meter, recover
    from tests.serving.energy.fake_machine import make

    with TemporaryDirectory() as folder:
        root = make(Path(folder))
        if path.suffix == ".json":
            yield "restored", float(recover(path, lambda name: setter(name, root)))
            return
        for file in ("energy_uj", "max_energy_range_uj"):
            (root / "class/powercap/intel-rapl:0" / file).write_bytes(path.read_bytes())
        meter = rapl_meter(root)
        assert meter is not None
        yield "joules", [*meter.read(), meter.between(meter.read(), meter.read())]
