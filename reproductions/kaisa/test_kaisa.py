"""The protocol in small: a run that reaches its target, one that is not run twice, and the library's losses."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from math import inf, prod
from pathlib import Path
from typing import Any

import pytest

from foretrace.cost.operators.bench import OperatorTimings
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError
from foretrace.experiment.statistics import Ratio
from reproductions.kaisa import crossing
from reproductions.kaisa.crossing import Crossing, continued, crossed, share_of
from reproductions.kaisa.library import compare
from reproductions.kaisa.protocol import crossing_section, main
from reproductions.kaisa.runs import Runs, train
from reproductions.kaisa.tasks import TASKS


def test_the_protocol_prints_both_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"sgd": ({"lr": 0.1},), "adam": ({"lr": 0.01},), "kfac": ({"lr": 0.1, "damping": 0.1, "clip": 0.03},)}
    monkeypatch.setattr("reproductions.kaisa.runs.SETTINGS", short)
    assert main(["--task", "deep-tanh", "--steps", "10", "--seeds", "1", "--crossing-seeds", "0"]) == 0
    text = capsys.readouterr().out
    assert text.count("| deep-tanh | 250 |") == 2 and "not reached" in text


def test_a_target_ends_a_run_and_what_was_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(TASKS[2], target=1.0)
    assert train(task, 250, "kfac", {"lr": 0.1, "damping": 0.1, "clip": 0.03}, 0, 20)["steps"] == 5
    first = Runs(tmp_path, 10).run(TASKS[2], 250, "sgd", {"lr": 0.1}, 0)
    monkeypatch.setattr("reproductions.kaisa.runs.train", None)  # it is not called again
    again = Runs(tmp_path, 10)
    assert again.run(TASKS[2], 250, "sgd", {"lr": 0.1}, 0) == first and again.cpu_s > 0


def test_the_crossing_lies_between_sizes_and_times_that_rise_are_levelled() -> None:
    assert crossed((10, 1000), (1.0, -1.0)) == pytest.approx(100)
    assert crossed((10, 100), (-1.0, -2.0)) == 0 and crossed((10, 100), (2.0, 1.0)) == inf
    assert crossed((1, 10, 100, 1000), (1.0, -1.0, 0.5, -2.0)) == pytest.approx(10**0.8)  # 1, -1/4, -1/4, -2
    sgd, kfac = ([{"steps": each} for each in steps] for steps in ((100, 120, 140), (50, 60, None)))
    share, _ = share_of(sgd, kfac)
    assert share.value == 0.5 and share.low >= 50 / 140 and share.high == inf


def test_what_two_sizes_show_is_continued_by_their_trend() -> None:
    given = {250: Ratio(value=0.4, low=0.3, high=0.5), 1000: Ratio(value=0.2, low=0.2, high=0.2)}
    below, between, above = (continued(given, batch, falling=True) for batch in (125, 500, 2000))
    assert (below.low, below.high) == pytest.approx((0.3, 0.5 * 2**0.5)) and below.value == pytest.approx(0.4 * 2**0.25)
    assert between.value == pytest.approx(0.08**0.5) and between.holds(0.3) and above.low == pytest.approx(0.2 / 2**0.5)
    rising = {250: given[1000], 1000: given[250]}
    assert continued(rising, 125, falling=True).value == 0.2 and continued(rising, 125).low == pytest.approx(
        0.2 / 2**0.5
    )


def known(share: float, ratios: dict[int, float], slow: float = 1.0) -> Crossing:
    """A crossing whose steps and seconds are known; `slow` at held-out sizes."""
    given = {batch: 1.0 if batch in crossing.GIVEN else slow for batch in ratios}
    return Crossing(
        task=TASKS[0], method="kfac",
        runs={batch: {"sgd": [{"steps": 100}] * 3, "kfac": [{"steps": 100 * share}] * 3} for batch in ratios},
        step_s={batch: {"sgd": [1.0] * 5, "kfac": [ratio * given[batch]] * 5} for batch, ratio in ratios.items()},
        ratios={batch: Ratio(value=each, low=0.95 * each, high=1.05 * each) for batch, each in ratios.items()},
    )  # fmt: skip


def test_a_crossing_is_verified_on_both_sides_on_one_or_refuted() -> None:
    ratios = {32: 3.0, 250: 2.0, 1000: 1.8, 2000: 1.5}
    found = known(0.5, ratios)
    assert 32 < found.predicted_from.value < 1000 and found.predicted_from.holds(found.measured_from.value)
    assert found.verdict() == "right at 32, 2000: the crossing is verified on both sides. Not resolved: none."
    assert "on one side at most. Not resolved: 32" in known(0.33, ratios).verdict()
    assert "wrong at 2000" in known(0.5, ratios, slow=2.0).verdict()


def counted(operators: Iterable[Operator], **_: Any) -> OperatorTimings:
    """A nanosecond per number that a call is given: these times are the same on all machines."""

    def numbers(dims: Any) -> int:
        return sum(map(numbers, dims)) if dims and isinstance(dims[0], list) else prod(dims) if dims else 0

    return OperatorTimings(seconds={each.key: 1e-6 + 1e-9 * numbers(each.dims) for each in operators})


def test_where_it_pays_is_predicted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = {"lr": 0.05, "damping": 0.1, "clip": 0.03}
    task = replace(TASKS[0], target=44.0)
    monkeypatch.setattr("reproductions.kaisa.runs.SETTINGS", {"sgd": (setting,), "kfac": (setting,)})
    monkeypatch.setattr(crossing, "SIZES", {task.name: (250, 500)})
    monkeypatch.setattr(crossing, "GIVEN", (250,))
    monkeypatch.setattr(crossing, "CROSSED", {task.name: ("kfac",)})
    monkeypatch.setattr("reproductions.kaisa.runs.bench.measure", counted)
    (found,) = crossing.cross(Runs(tmp_path, 60), task, 2)
    assert found.ratios[500].low <= found.ratios[500].value < found.ratios[250].value  # its own work hardly grows
    assert {each.techniques for each in found.rows()} == {"kfac step", "kfac time to target"}
    text = "".join(crossing_section([found]))
    assert text.count("| auto-encoder | 5/20 |") == 2 and "predicted to pay from a batch of" in text


def test_losses_are_those_of_the_library() -> None:
    checkout = os.environ.get("FORETRACE_KFAC_PYTORCH")
    if not checkout and not find_spec("kfac"):
        pytest.skip("kfac-pytorch is not here: set FORETRACE_KFAC_PYTORCH to a checkout of it")
    for task in TASKS[:3]:
        (case,) = compare(task.name, Path(checkout) if checkout else None, steps=12, fractions=())["cases"]
        assert len(set(case["ours"])) > 10 and case["apart"] < 1e-3


def test_without_the_library_it_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="must be a checkout of kfac-pytorch"):
        compare(TASKS[0].name, tmp_path)


def test_digits_of_scikit_learn_are_a_task_where_they_are() -> None:
    task = TASKS[3]
    if not find_spec("sklearn"):
        with pytest.raises(ForetraceError, match="scikit-learn is not installed"):
            task.data(held_out=True)
        pytest.skip("scikit-learn is not installed")
    image, label = task.data(held_out=True)
    assert image.shape == (297, 1, 8, 8) and image.max() == 1.0 and set(label.tolist()) == set(range(10))
