"""Stalls of a step: from a recording, and by differential runs of real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import hypot
from pathlib import Path
from typing import Any, cast

import pytest

from foretrace import executor
from foretrace.errors import ForetraceError
from foretrace.experiment import cores
from foretrace.experiment import differential as module
from foretrace.experiment.differential import DifferentialRequest, differential
from foretrace.experiment.links import arms
from foretrace.experiment.messages import Make, RunSteps, Setup, TimedSteps, Worker
from foretrace.experiment.processes import Workers
from foretrace.experiment.stalls import stalls
from foretrace.flow import read
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.training.training import Training

RECORDED = Path(__file__).parents[1] / "data" / "cnn.json.gz"


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    return read(RECORDED).graph().graph


def test_the_bars_of_one_worker_are_its_loader(graph: TaskGraph) -> None:
    found = stalls(graph)
    loading = simulate(graph).breakdown().median_s()["data_loading"]
    bars = {bar.name: bar for bar in found.bars}
    assert set(bars) == {"preparation", "fetch"}
    assert bars["preparation"].seconds + bars["fetch"].seconds == pytest.approx(loading)
    assert found.alone_s == pytest.approx(found.recorded_s - loading)
    assert any(line.startswith("interconnect") for line in found.unknown)


def test_a_slower_link_stalls_longer(graph: TaskGraph) -> None:
    fast = stalls(graph, workers=4, inside="10gbit/5us", between="1gbit/50us")
    slow = stalls(graph, workers=4, inside="10gbit/5us", between="10mbit/50us")
    for found in (fast, slow):
        assert [bar.name for bar in found.bars][:2] == ["interconnect", "network"]
        assert all(bar.low_s <= bar.seconds <= bar.high_s for bar in found.bars)
    assert slow.bars[1].seconds > fast.bars[1].seconds
    assert slow.bars[0].seconds == fast.bars[0].seconds


def test_time_off_the_processor_is_fetching(graph: TaskGraph) -> None:
    step = {"phase": "active", "loader_wall_ns": 10_000_000, "loader_cpu_ns": 9_900_000}
    told = replace(graph, info=replace(graph.info, recording={**graph.info.recording, "steps": [step]}))
    assert {bar.name: bar.seconds for bar in stalls(told).bars}["fetch"] == pytest.approx(1e-4)


def test_waiting_for_a_core_is_no_storage(graph: TaskGraph) -> None:
    step = {"phase": "active", "wall_ns": 60_000_000, "cpu_ns": 35_000_000, "loader_wall_ns": 30_000_000,
            "loader_cpu_ns": 10_000_000, "loader_queued_ns": 8_000_000}  # fmt: skip

    def told(**overhead: float) -> dict[str, float]:
        info = replace(graph.info, overhead=overhead, recording={**graph.info.recording, "steps": [step]})
        return {bar.name: bar.seconds for bar in stalls(replace(graph, info=info)).bars}

    assert told() == pytest.approx({"preparation": 18e-3, "fetch": 12e-3})
    # Others took 5 of 25 ms of CPU time elsewhere, so 2 of the 10 in the loader: 6 are its own.
    assert told(cpu_clock=1.0) == pytest.approx({"preparation": 16e-3, "fetch": 12e-3})


def _steps(wall_s: float, queued_s: float) -> TimedSteps:
    return TimedSteps(wall_s=wall_s, cpu_s=wall_s, loss=None, queued_s=queued_s)


def test_blocks_that_others_disturb_are_run_again() -> None:
    """Others take a core from the second time on, for three times: only runs on all cores notice, and none counts."""
    done, asked = dict[str, int](), list[str]()

    class Asked:
        def __len__(self) -> int:
            return 2

        def ask(
            self, function: Callable[..., Any], given: Any, *_: object, first: bool = False, **__: object
        ) -> list[Any]:
            asked.append(function.__name__)
            if not isinstance(given, RunSteps):
                return []
            count = done[given.name] = done.get(given.name, 0) + 1
            if first:
                return [_steps(0.1, 0.0)]
            late = 0.02 * (count in (2, 3, 5))
            return [_steps(0.15 + late, 0.01 + late), _steps(0.14, 0.01)]

    workers = cast(Workers, Asked())
    wanted = DifferentialRequest(work="gpt2", workers=2)
    runs = module._run(wanted, workers, workers, ["alone", "all", "cached"], (), lambda share: None)
    assert {each.wall_s for each in runs["all"] + runs["cached"]} == {0.15}
    assert {len(blocks) for blocks in runs.values()} == {module.ROUNDS}
    assert done == {"alone": module.ROUNDS + 1, "all": module.ROUNDS + 4, "cached": module.ROUNDS + 4}
    assert asked == ["make", "run_steps", "forget"] * sum(done.values())  # no loader runs beside another arm


def test_ranges_hold_the_stall_without_waiting_for_cores() -> None:
    """Whether others or own threads kept workers waiting cannot be told: the range reaches to the figure without.

    And two copies of a run differ by up to 2 % of a step.
    """
    queued = [0.001, 0.004, 0.004, 0.004]
    runs = {"alone": [_steps(0.020, 0.0)] * 4, "all": [_steps(0.028 + each, 0.002 + each) for each in queued]}
    (bar,) = module._bars(runs)
    assert bar.seconds == pytest.approx(0.012)
    assert bar.low_s == pytest.approx(0.012 - hypot(0.003, 0.02 * 0.032))
    assert bar.high_s == pytest.approx(0.012 + 0.02 * 0.032)


def test_what_never_leaves_the_cores_widens_every_stall() -> None:
    """A steady load is in every block: no block is calm, and the range reaches to the figure without any waiting."""
    runs = {"alone": [_steps(0.020, 0.0)] * 4, "all": [_steps(0.032, 0.004)] * 4}
    (calm,) = module._bars(runs)
    (crowded,) = module._bars(runs, crowded=True)
    copies = 0.02 * 0.032
    assert calm.low_s == pytest.approx(0.012 - copies)
    assert crowded.low_s == pytest.approx(0.012 - hypot(0.004, copies))
    assert crowded.high_s == calm.high_s


def test_a_process_that_never_sleeps_is_noticed() -> None:
    """One beside every core that is needed leaves about half of them."""
    needed = executor.cores()
    assert cores.taken(needed, [needed, 0.95 * needed]) == ""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(needed)]
    try:
        left = cores.wait_for_cores(needed, 0.0)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert f"the machine had {left:.1f} left" in cores.taken(needed, [needed, left])


def test_waits_of_the_loader_are_not_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that waits for a core is a stall; a thread that waits beside it is a disturbance."""
    torch = pytest.importorskip("torch")
    waited, ended = [0.0], []

    class Loader:
        def __iter__(self) -> Iterator[float]:
            try:
                while True:
                    waited[0] += 5.0
                    yield 1.0
            finally:
                ended.append(True)

    def loss(module: Any, batch: float) -> Any:
        waited[0] += 1.0
        return module(torch.ones(1)).sum() * batch

    def training(setup: Setup) -> Training:
        return Training(name="mine", model=torch.nn.Linear(1, 1), optimizers=(), loader=Loader(), loss=loss)

    monkeypatch.setattr(arms, "training_of", training)
    monkeypatch.setattr(arms, "queued_s", lambda *threads: waited[0])
    worker = Worker(lambda what, share: None)
    arms.make(Make(name="cached", setup=Setup(work="mine", loads=True)), worker)
    arms.run_steps(RunSteps(name="cached", discarded=2, steps=1, together=False), worker)
    found = arms.run_steps(RunSteps(name="cached", discarded=1, steps=4, together=False), worker)
    assert found.queued_s == pytest.approx(1.0)
    assert not ended
    arms.forget(None, worker)
    assert ended and not worker.kept


@pytest.mark.slow("four kinds of runs of real workers, in turns")
@pytest.mark.skipif(executor.cores() < 2, reason="two workers need two cores")
def test_runs_are_subtracted_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(module, "_SIZES", (1 << 10, 1 << 17, 1 << 20))
    told: list[str] = []
    script = str(Path(__file__).parent / "script.py")
    found = differential(DifferentialRequest(work=script, workers=2, steps=2), lambda what, share: told.append(what))
    assert {"alone", "all", "cached"} <= set(found.runs_s)
    assert {len(times) for times in found.runs_s.values()} == {2}
    names = [bar.name for bar in found.measured]
    assert "interconnect" in names and "preparation" in names
    assert found.predicted.bars[0].name == "interconnect"
    assert found.notes or "fetch" in names
    assert "running" in told


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (DifferentialRequest(work="gpt2", workers=1), "2 or more"),
        (DifferentialRequest(work="gpt2", workers=4096), "cores"),
        (DifferentialRequest(work="gpt2", workers=2, steps=0), "1 or more"),
        (DifferentialRequest(work="gpt2", workers=2, data=("/nowhere/at/all",)), "no such file"),
    ],
)
def test_what_cannot_be_run_is_refused(wanted: DifferentialRequest, complaint: str) -> None:
    with pytest.raises(ForetraceError, match=complaint):
        differential(wanted, lambda what, share: None)
