"""Profiles of applications as the Pollux study measured them: between measurements, by hand, and refused."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.fleet.pollux.profiles import Application, Profiles, read_application


def step(nodes: int, replicas: int, local: float) -> tuple[float, float]:
    """Seconds of the small profile: linear, so that every interpolation has a known answer; exact in binary."""
    return local / 8 + (nodes - 1) / 4 + (replicas - 2) / 8, nodes / 16 + replicas / 32


def write_profile(folder: Path) -> None:
    folder.mkdir(parents=True)
    head = "local_bsz,step_time,sync_time\n"
    rows = [(p, len(p), sum(map(int, p)), m) for p in ("1", "2", "11", "12") for m in (8, 4)]
    lines = [f"{p},{m},{step(n, k, m)[0]},{step(n, k, m)[1]}" for p, n, k, m in rows]
    (folder / "placements.csv").write_text("placement," + head + "\n".join(lines) + "\n")
    wide = [(n, k, m) for n in (1, 2, 3, 4) for k in range(n, 4 * n + 1) for m in (4, 8) if n + k > 3]
    lines = [f"{n},{k},{m},{step(n, k, m)[0]},{step(n, k, m)[1]}" for n, k, m in wide]
    (folder / "scalability.csv").write_text("num_nodes,num_replicas," + head + "\n".join(lines) + "\n")
    head = "progress,iteration,metric,grad_sqr,grad_var\n"
    (folder / "validation-8.csv").write_text(head + "100,100,0,1,1\n250,250,0,1,4\n")
    (folder / "validation-16.csv").write_text(head + "120,70,0,1,2\n239.125,130,0,1,6\n")
    (folder / "validation-32.csv").write_text(head + "130,45,0,1,2\n260,90,0,1,6\n999,100,0,1,6\n")


def add(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pollux") / "profiles"
    write_profile(folder / "toy")
    return folder


@pytest.fixture(scope="module")
def toy(profiles: Path) -> Application:
    return read_application(profiles / "toy")


def test_batch_is_split_as_published(toy: Application) -> None:
    assert toy.split(16, 2) == (8, 0)
    assert toy.split(8, 1) == (8, 0)
    assert toy.split(10, 1) == (5, 1), "one replica with more than the smallest batch accumulates"
    assert toy.split(8, 1, always_accumulate=True) == (4, 1)
    assert toy.split(32, 1) == (8, 3)
    assert toy.split(31, 3) == (5, 1), "11 each is more than 8, so two passes; 6 x 6 samples would exceed 32"


def test_step_times_between_measurements(toy: Application) -> None:
    assert toy.step_seconds((1,), 8) == step(1, 1, 8)
    assert toy.step_seconds((2,), 6) == step(1, 2, 6)
    assert toy.step_seconds((2, 1), 6) == toy.step_seconds((1, 2), 6) == step(2, 3, 6)
    assert toy.step_seconds((3, 2), 6) == pytest.approx(step(2, 5, 6)), "not measured: from all configurations"
    with pytest.raises(ForetraceError, match=r"no measurement covers 1 GPUs placed 1 with a local batch of 9"):
        toy.step_seconds((1,), 9)
    with pytest.raises(ForetraceError, match="no measurement covers 20 GPUs"):
        toy.step_seconds((4, 4, 4, 4, 4), 8)
    with pytest.raises(ForetraceError, match="one digit"):
        toy.step_seconds((10,), 8)


def test_gradients_between_batch_sizes(toy: Application) -> None:
    assert toy.grad_stats(8, 0) == (1, 1)
    assert toy.grad_stats(12, 0) == (1, 1.5)
    assert toy.gain(16, 1) == 1.75
    assert toy.ends == [100, 239.125], "as many epochs as the shortest run"


def test_other_placements_need_scipy(profiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.interpolate", None)
    app = read_application(profiles / "toy")
    assert app.step_seconds((1, 1), 8) == step(2, 2, 8)
    with pytest.raises(MissingExtraError, match="pip install scipy"):
        app.step_seconds((3,), 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "placements.csv").unlink(), "toy has no placements.csv"),
        (lambda d: (d / "placements.csv").write_text(""), "has no header line"),
        (lambda d: (d / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time\n1,1,1,1\n"),
         "has no column 'sync_time'"),
        (lambda d: (d / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n"),
         "has no rows"),
        (lambda d: (d / "validation-8.csv").write_text("progress,iteration,grad_sqr,grad_var\n1,2,x,4\n"),
         "validation-8.csv, line 2: grad_sqr is 'x', not a number"),
        (lambda d: (d / "validation-8.csv").write_text("progress,iteration,grad_sqr,grad_var\n5,2,1,4\n5,3,1,4\n"),
         "progress must grow"),
        (lambda d: (d / "validation-8.csv").write_text("progress,iteration,grad_sqr,grad_var\n5,2,0,0\n"),
         "nor both zero"),
        (lambda d: (d / "validation-8.csv").rename(d / "validation-x.csv"), "must give a total batch size"),
        (lambda d: [each.unlink() for each in d.glob("validation-*")], "no validation-BATCH.csv"),
        (lambda d: add(d / "placements.csv", "1,4,1,0.5\n"), "placement 1 has a local_bsz twice"),
        (lambda d: add(d / "placements.csv", "3,4,0.5,1\n"), "sync_time is not below"),
        (lambda d: add(d / "placements.csv", "1.5,4,1,0.5\n"), "placement must be 1 to 15 digits"),
        (lambda d: (d / "placements.csv").unlink(), "placements.csv"),
    ],
)  # fmt: skip
def test_profiles_that_cannot_be_used(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    write_profile(tmp_path / "profiles" / "toy")
    change(tmp_path / "profiles" / "toy")
    with pytest.raises(ForetraceError, match=message):
        read_application(tmp_path / "profiles" / "toy")


def test_changed_profiles_are_read_again(tmp_path: Path) -> None:
    write_profile(tmp_path / "toy")
    assert Profiles(tmp_path).application("toy") is Profiles(tmp_path).application("toy")
    add(tmp_path / "toy" / "placements.csv", "3,4,1,0.25\n")
    assert Profiles(tmp_path).application("toy").step_seconds((3,), 4) == (1, 0.25)


def test_packed_profiles_are_read(tmp_path: Path, toy: Application) -> None:
    write_profile(tmp_path / "toy")
    for path in list((tmp_path / "toy").iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = read_application(tmp_path / "toy")
    assert (packed.points == toy.points).all()
    assert packed.placements == toy.placements
    assert list(packed.validation) == [8, 16, 32]
