"""Real collectives between real processes; what happens when one dies, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.cost.network.collective_bench import LEAST_REPETITIONS, _robust, measure_collectives
from foretrace.cost.network.collective_table import series_of, table_of
from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.network.parse import network
from foretrace.errors import ForetraceError
from foretrace.experiment import collectives, processes
from foretrace.experiment.forks import Fork, fork

MEMBER = """
import sys
from foretrace.cost.network.collective_bench import measure_collectives
table = measure_collectives(
    int(sys.argv[1]), 2, sizes=[1024, 65536], kinds=["all-reduce", "all-gather", "send"],
    init_method="file://" + sys.argv[2], timeout_s=float(sys.argv[3]),
)
print([(str(each.kind), each.nbytes, len(each.seconds)) for each in table.series])
"""


def test_two_processes_measure_and_the_table_predicts(tmp_path: Path) -> None:
    told: list[float] = []
    table = collectives.calibrate(
        workers=2, sizes=[1024, 16384, 262144], kinds=["all-reduce", "broadcast"], progress=told.append, limit_s=120
    )
    assert [each.kind for each in table.series] == [CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST]
    for series in table.series:
        assert series.workers == 2 and series.nbytes == (1024, 16384, 262144)
        assert all(1e-6 < seconds < 10 for seconds in series.seconds) and len(series.spread) in (0, 3)
    assert table.backend == "gloo" and table.measured and table.repetitions == LEAST_REPETITIONS
    assert table.machine["threads"] == 1 and told and max(told) <= 1
    table.save(tmp_path / "table.json")
    cost = network(str(tmp_path / "table.json"), 2).cost(CollectiveKind.ALL_REDUCE, 16384)
    assert cost.seconds == pytest.approx(table.series[0].seconds[1]) and cost.low_s < cost.seconds < cost.high_s


def test_members_that_somebody_else_starts_get_the_same_table(tmp_path: Path) -> None:
    words = [sys.executable, "-c", MEMBER]
    members = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "meet"), "60"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [member.communicate(timeout=120)[0] for member in members]
    assert [member.returncode for member in members] == [0, 0] and said[0] == said[1]
    assert "all-gather" in said[0] and "send" in said[0]


def test_a_member_that_never_comes_is_a_sentence(tmp_path: Path) -> None:
    alone = subprocess.run(
        [sys.executable, "-c", MEMBER, "0", str(tmp_path / "meet"), "2"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert alone.returncode != 0 and "a member died or never came" in alone.stderr


def test_a_killed_worker_ends_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Fork] = []

    def noted(*words: Any, **options: Any) -> Fork:
        workers.append(fork(*words, **options))
        if len(workers) == 2:
            threading.Timer(1.5, workers[1].kill).start()
        return workers[-1]

    monkeypatch.setattr(processes, "fork", noted)
    began = time.monotonic()
    with pytest.raises(ForetraceError, match=r"worker 1 was ended by SIGKILL.* Nothing was stored"):
        collectives.calibrate(workers=2, sizes=[1 << 26], repetitions=500, limit_s=120)
    assert time.monotonic() - began < 110 and all(worker.poll() is not None for worker in workers)


def test_a_limit_in_time_holds() -> None:
    with pytest.raises(ForetraceError, match="longer than 3 s"):
        collectives.calibrate(workers=2, sizes=[1 << 26], repetitions=500, limit_s=3)


def test_a_noisy_time_is_refused_with_its_size() -> None:
    def table(spread: float) -> None:
        points = [(1000.0, 1.0, 0.01), (2_000_000.0, 2.0, spread)]
        series = series_of("t", kind=CollectiveKind.ALL_REDUCE, workers=2, per_node=2, points=points)
        collectives.refuse_noise(table_of("t", [series], repetitions=15))

    table(0.09)
    with pytest.raises(ForetraceError, match=r"2,000,000 bytes varies by 42 %.*`accept_noise=`"):
        table(0.42)


def test_the_slowest_fifth_does_not_count() -> None:
    times = np.full(20, 1e-3)
    times[:4] = 1.0
    assert _robust(times) == (1e-3, 0.0)
    assert _robust(np.linspace(1.0, 2.0, 21))[1] > 0.2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workers": 1}, "1 workers"),
        ({"workers": 10_000}, "10000 workers"),
        ({"backend": "smoke"}, "backend smoke"),
        ({"backend": "nccl"}, "a GPU per worker"),
        ({"kinds": ["hug"]}, "hug"),
        ({"repetitions": 3}, "too few"),
        ({"sizes": []}, "above 0"),
        ({"sizes": [-4]}, "above 0"),
    ],
)
def test_bad_arguments_are_sentences(change: dict[str, object], says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        collectives.calibrate(**{"workers": 2, "sizes": [1024], **change})  # type: ignore[arg-type]


def test_bad_members_are_sentences() -> None:
    with pytest.raises(ForetraceError, match="rank 2 is none of 2"):
        measure_collectives(2, 2, sizes=[4])
    with pytest.raises(ForetraceError, match="no process group"):
        measure_collectives(0, 2, sizes=[4])


def test_sizes_between() -> None:
    assert collectives.sizes_between(1024, 1 << 20, 3) == (1024, 32768, 1 << 20)
    assert collectives.sizes_between(1024, 1024, 5) == (1024,)
    for least, most, count in ((0, 8, 2), (8, 4, 2), (4, 8, 0)):
        with pytest.raises(ForetraceError, match="cannot be"):
            collectives.sizes_between(least, most, count)
