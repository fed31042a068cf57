"""Zeus' recorded trainings: optima as published in the reference table, and searches that find them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.serving.energy import recorded
from foretrace.serving.energy.tune import limit, tune
from tests.cli.conftest import DATA, Cli, cli  # noqa: F401

# GPU, workload: setting, energy and time of the least energy, of the least time, and within 1.1 times the least time.
OPTIMA = {
    ("v100", "cifar100"): (((128, 100), 28478, 339), ((256, 225), 51936, 311), ((128, 100), 28478, 339)),
    ("v100", "imagenet"): (((360, 150), 12.50e6, 86939), ((360, 250), 15.93e6, 73206), ((360, 175), 13.23e6, 80111)),
    ("v100", "librispeech"): (((32, 100), 5.451e6, 57579), ((48, 250), 7.813e6, 39989), ((48, 200), 6.828e6, 42633)),
    ("v100", "movielens"): (((16384, 150), 1078.8, 31.0), ((16384, 175), 1119.2, 30.9), ((16384, 150), 1078.8, 31.0)),
    ("v100", "squad"): (((8, 125), 1.175e6, 9813), ((12, 250), 1.513e6, 6695), ((12, 200), 1.341e6, 7158)),
    ("v100", "sentiment140"): (((32, 125), 2.030e6, 16923), ((64, 250), 2.665e6, 12083), ((64, 200), 2.364e6, 12845)),
    ("a40", "cifar100"): (((128, 125), 40861, 336), ((128, 225), 48409, 309), ((128, 125), 40861, 336)),
    ("a40", "imagenet"): (((360, 200), 15.46e6, 87925), ((256, 300), 19.19e6, 81567), ((360, 200), 15.46e6, 87925)),
    ("a40", "librispeech"): (((32, 175), 5.280e6, 38099), ((32, 275), 6.387e6, 35460), ((32, 175), 5.280e6, 38099)),
    ("a40", "movielens"): (((16384, 100), 2900.1, 36.3), ((16384, 300), 3127.5, 35.9), ((16384, 100), 2900.1, 36.3)),
    ("a40", "squad"): (((16, 200), 0.782e6, 4164), ((32, 300), 0.995e6, 3729), ((32, 225), 0.833e6, 3966)),
    ("a40", "sentiment140"): (((128, 200), 1.310e6, 6681), ((128, 300), 1.650e6, 6007), ((128, 250), 1.506e6, 6238)),
}


@pytest.fixture
def traces(shared_data: Path) -> Path:
    found = shared_data / "energy" / "zeus"
    if not found.is_dir():
        pytest.skip(f"no traces of Zeus at {found}")
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two batch sizes, two limits; one run that did not arrive, one size that never does, one that was not metered."""
    (tmp_path / "summary_power_x1.csv").write_text(
        "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n"
        "toy,n,8,sgd,100,10.0,90.0\ntoy,n,8,sgd,200,8.0,150.0\ntoy,n,16,sgd,100,6.0,95.0\ntoy,n,16,sgd,200,nan,nan\n"
        "toy,n,32,sgd,200,5.0,170.0\n"
    )
    (tmp_path / "summary_train.csv").write_text(
        "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\n"
        "toy,n,8,sgd,0.1,1,0.5,2\ntoy,n,8,sgd,0.1,2,0.5,4\ntoy,n,8,sgd,0.1,3,0.5,\ntoy,n,16,sgd,0.1,1,0.5,7\n"
        "toy,n,32,sgd,0.1,1,0.5,nan\n"
    )
    return tmp_path


@pytest.mark.parametrize("key", OPTIMA, ids=" ".join)
def test_known_optima(traces: Path, key: tuple[str, str]) -> None:
    found = recorded.read([f"zeus:{traces}", f"workload={key[1]}", f"gpu={key[0]}"])
    limit_s = 1.1 * found.points[found.fastest].time_s
    for at, (setting, energy_j, time_s) in zip(
        (found.optimum(np.inf), found.fastest, found.optimum(limit_s)), OPTIMA[key], strict=True
    ):
        assert at is not None and at == setting
        each = found.points[at]
        assert each.energy_j == pytest.approx(energy_j, rel=6e-4)
        assert each.time_s == pytest.approx(time_s, rel=2e-3)


def test_search_comes_within_two_per_cent(traces: Path) -> None:
    found = recorded.read([f"zeus:{traces}", "workload=squad", "gpu=a40"])
    for seed in range(3):
        tuned = tune(found, "1.1x", evaluations=20, seed=seed)
        assert tuned.optimum is not None and tuned.at_best.time_s <= tuned.limit_s
        assert tuned.at_best.energy_j <= 1.02 * found.points[tuned.optimum].energy_j


def test_only_runs_that_arrived_and_were_metered_count(small: Path) -> None:
    found = recorded.read([f"zeus:{small}", "workload=toy", "target=0.5"])
    assert {at: (each.time_s, each.energy_j) for at, each in found.points.items()} == {
        (8, 100): (30, 2700), (8, 200): (24, 3600), (16, 100): (42, 3990),
    }  # fmt: skip
    assert tuple(sorted(found.points)) == ((8, 100), (8, 200), (16, 100))
    assert tune(found, "1.3x", evaluations=9).best == (8, 100)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workload=toy"], "`target=`"),
        (["workload=toys", "target=0.5"], "was not recorded"),
        (["workload=toy", "target=0.6"], "choose one of 0.5"),
        (["workload=toy", "target=high"], "must be a number"),
        (["workload=toy", "target=0.5", "gpu=h100"], "gpu=h100 was not recorded"),
        (["workload=toy", "target=0.5", "batch=8"], "no parameter"),
    ],
)
def test_what_was_not_recorded(small: Path, words: list[str], said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        recorded.read([f"zeus:{small}", *words])


def test_other_files(small: Path, tmp_path: Path) -> None:
    (small / "summary_train.csv").write_text("a,b\n")
    with pytest.raises(ForetraceError, match="no column dataset"):
        recorded.read([f"zeus:{small / 'summary_power_x1.csv'}", "workload=toy", "target=0.5"])
    with pytest.raises(ForetraceError, match="has no summary_power_GPU"):
        recorded.read([f"zeus:{tmp_path / 'nowhere'}", "workload=toy"])


def test_no_more_settings_are_measured_than_asked() -> None:
    found = recorded.read([f"zeus:{DATA / 'energy'}", "workload=squad"])
    for evaluations in (1, 2, 7):
        assert len(tune(found, "1.2x", evaluations=evaluations).measured) == evaluations


def test_limits_are_read() -> None:
    assert limit("1.1x", 10) == pytest.approx(11)
    assert (limit("250ms", 1), limit("2s", 1)) == (0.25, 2)
    for text in ("fast", "-1s", "0x", "infs", ""):
        with pytest.raises(ForetraceError, match="no limit of a time"):
            limit(text, 1.0)


def test_command(small: Path, cli: Cli) -> None:  # noqa: F811
    answer = cli("energy", "tune", f"zeus:{small}", "workload=toy", "target=0.5", "--slo", "1.3x", "--json").json
    assert (answer["best"], answer["energy_j"], answer["time_s"]) == ({"batch": 8, "gpu-power-limit": 100}, 2700, 30)
    assert (answer["evaluations"], answer["default_energy_j"], answer["optimum_j"]) == (3, 3990, 2700)
    nothing = cli("energy", "tune", f"zeus:{small}", "workload=toy", "target=0.5", "--slo", "1s")
    assert nothing.code == 2 and "the fastest, batch=8 gpu-power-limit=200, takes 24 s" in nothing.err
    assert "leave out --set" in cli("energy", "tune", f"zeus:{small}", "--set", "batch=1").err
