"""A few products of a GPU that nobody measured: which ones, their way to another machine and back, what they change."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from foretrace import deadline
from foretrace.cli.app import run
from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.learned import Learned, gemm16_shift, gpu_products
from foretrace.cost.devices.learned.gemm16 import Gemm16
from foretrace.cost.devices.learned.gemm16_law import Chip
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import named

B200, MI300X = named("B200-SXM"), named("mi300x")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path / "cache"))


def slower(rows: np.ndarray, by: float = 1.4) -> np.ndarray:
    """Times of a board that takes so many times what is expected of it."""
    m, n, k = rows.T
    return np.asarray(by * Gemm16.load().seconds(B200, m, n, k))


def test_the_first_few_are_the_choice_of_fewer_and_fit_the_memory() -> None:
    rows = gpu_products.products(B200, 50)
    assert rows.shape == (50, 3) and len(np.unique(rows, axis=0)) == 50
    assert np.array_equal(rows[:12], gpu_products.products(B200, 12))
    small = named("T4")
    m, n, k = gpu_products.products(small, 50).T
    assert (2 * (m * n + n * k + m * k) < 0.5e9 * small.memory_gb).all()


def test_each_choice_leaves_the_least_variance() -> None:
    """Against the posterior variance of a pool of twenty computed from its covariance, for the first three choices."""
    model = Gemm16.load()
    pool = model.pool[:20].astype(float)
    m, n, k = pool.T
    chip = Chip.of(B200)
    _, places, _ = model._places(chip, m, n, k, None)
    steep = gemm16_shift.slopes(model.theta, model.belief.names, chip, m, n, k)
    whole = model.belief.covariance(places, places) + model.belief.of_law(steep, steep)
    noise = np.exp(2 * model.belief.hyper[gemm16_shift.NOISE])

    def left(rows: list[int]) -> float:
        cross = whole[:, rows]
        inside = whole[np.ix_(rows, rows)] + noise * np.eye(len(rows))
        return float(np.trace(whole - cross @ np.linalg.solve(inside, cross.T)))

    chosen = gemm16_shift.choose(model.belief, places, steep, 3).tolist()
    for i in range(3):
        others = [row for row in range(20) if row not in chosen[:i]]
        assert left(chosen[: i + 1]) <= min(left([*chosen[:i], row]) for row in others) + 1e-9


def test_a_plan_goes_elsewhere_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.csv"
    assert run(["calibrate", "device", "--gpu", "b200-sxm", "--operators", "20", "--plan", str(plan), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = gpu_products.products(B200, 20)
    assert answer["seconds"] is None and answer["products"] == rows.tolist()
    # nothing was filled in yet
    assert run(["calibrate", "device", "--gpu", "b200-sxm", "--times", str(plan)]) == 2
    assert "us is ''" in capsys.readouterr().err
    with plan.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [[int(line[c]) for c in "mnk"] for line in lines] == rows.tolist()
    for line, seconds in zip(lines, slower(rows), strict=True):
        line["us"] = repr(1e6 * float(seconds))
    with plan.open("w", newline="") as file:
        table = csv.DictWriter(file, lines[0])
        table.writeheader()
        table.writerows(lines)
    call = Calls.from_rows([Call(family=Family.GEMM, precision=Precision.BF16, m=4096, n=4096, k=4096)])
    before, other = (float(Learned().predict(call, device).seconds[0]) for device in (B200, MI300X))
    assert run(["calibrate", "device", "--gpu", "b200-sxm", "--times", str(plan)]) == 0
    assert "20 products of" in capsys.readouterr().out
    found = Learned().predict(call, B200)
    assert 1.05 * before < found.seconds[0] < 1.6 * before
    assert "20 products measured" in found.whys[0]
    assert float(Learned().predict(call, MI300X).seconds[0]) == other


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "x.csv"], "name it"),
        (["--gpu", "b200-sxm", "--plan", "x.csv", "--times", "y.csv"], "one of them"),
        (["--gpu", "h100-sxm5-80gb", "--plan", "x.csv"], "measured in full"),
        (["--gpu", "b200-sxm", "--operators", "1", "--plan", "x.csv"], "2 to"),
    ],
)
def test_what_cannot_be_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "device", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run(["calibrate", "device", "--gpu", "here"]) == 2
    assert "--plan FILE" in capsys.readouterr().err


def test_products_are_timed() -> None:
    """On the processor here: what has a thousand times the work takes longer."""
    pytest.importorskip("torch")
    times = gpu_products.seconds(np.array([[16, 16, 16], [512, 512, 512]]), device="cpu")
    assert (times > 0).all() and times[1] > times[0]


@pytest.mark.parametrize(("budget_s", "timed"), [(0.5, 2), (5.5, 5), (100.0, 9)])
def test_products_keep_their_time(budget_s: float, timed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    now = [0.0]

    def once(*_: object) -> float:
        now[0] += 1.0
        return 1e-5

    monkeypatch.setattr(deadline, "uncompiled", lambda: now[0])
    monkeypatch.setattr(gpu_products, "_once", once)
    assert len(gpu_products.seconds(np.full((9, 3), 16), device="cpu", budget_s=budget_s)) == timed


def test_one_time_is_too_few_to_keep() -> None:
    rows = gpu_products.products(B200, 2)
    with pytest.raises(ForetraceError, match="at least two"):
        gpu_products.keep(B200, rows[:1], slower(rows[:1]))


def test_left_out_families_are_never_worse_with_measurements_than_without() -> None:
    """What the training run reports of the shipped weights: means over five pools, 0.3 points for the pool."""
    report = json.loads((Path(gpu_products.__file__).parent / "gemm16.json").read_text(encoding="utf-8"))
    table = report["law, error by measured products of the GPU left out"]
    assert len(table) == 5
    for rows in table.values():
        assert all(row["mean"] < rows["0"]["mean"] + 0.003 for row in rows.values())
        assert all(row["covered"] > 0.8 for row in rows.values())
