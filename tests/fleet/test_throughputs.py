"""Gavel's tables of speeds: read, asked, and as a model of speed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet.speeds import Shape, Speeds
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.workload import Workload

SMALL: dict[str, Any] = {
    "v100": {
        "('A', 1)": {"null": 10.0, "('A', 1)": [5.0, 5.0], "('B', 1)": [6.0, 1.5]},
        "('B', 1)": {"null": 2.0},
        "('A', 2)": {"null": 18},
    },
    "v100_unconsolidated": {"('A', 2)": {"null": 9.0}, "('A', 1)": {"null": 1.0}},
    "k80": {"('A', 1)": {"null": 2.5}, "('A', 2)": {"null": 4.0}, "('B', 1)": {"null": 0.0}},
}


@pytest.fixture
def small(tmp_path: Path) -> ThroughputTable:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    return ThroughputTable.read(path)


def two_jobs() -> Workload:
    return Workload.of(submit_s=[0, 0, 0], gpus=[2, 1, 2], work_s=[1, 1, 1], model=["A", "B", "A"])


def test_plain_and_gzipped_files_are_alike(tmp_path: Path, small: ThroughputTable) -> None:
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(SMALL).encode()))
    zipped = ThroughputTable.read(path)
    assert zipped.alone == small.alone
    assert zipped.shared == small.shared


def test_rates_and_pairs(small: ThroughputTable) -> None:
    assert small.rate("v100", "A", 2) == 18.0
    assert small.rate("v100", "A", 2, together=False) == 9.0
    assert small.rate("v100", "A", 1, together=False) == 10.0  # one GPU is always together
    assert small.pair_rates("v100", ("A", 1), ("B", 1)) == (6.0, 1.5)
    assert small.pair_rates("v100", ("B", 1), ("A", 1)) == (1.5, 6.0)  # as written the other way around


def test_speed_is_relative_to_the_reference_type_together(small: ThroughputTable) -> None:
    model: Speeds = small
    work = two_jobs()
    assert model.kinds(work).tolist() == [0, 1, 0]
    assert model.speed(work, 0, Shape(2, (1, 1))).progress == 1.0
    assert model.speed(work, 0, Shape(2, (2, 1))).progress == 0.5
    assert model.speed(work, 0, Shape(2, (1, 1), gpu_type="k80")).progress == 4.0 / 18.0
    assert model.speed(work, 0, Shape(1, (1, 1))).progress == 10.0 / 18.0  # an elastic job on fewer
    assert model.speed(work, 1, Shape(1, (1, 1), gpu_type="k80")).progress == 0.0


@pytest.mark.parametrize(
    ("shape", "job", "words"),
    [
        (Shape(2, (1, 1), gpu_type="a100"), 0, "no GPU type 'a100'.*k80, v100"),
        (Shape(4, (1, 1)), 0, "its sizes are 1, 2"),
        (Shape(1, (1, 1), sharers=1), 1, "depends on its partner"),
        (Shape(2, (2, 1), gpu_type="k80"), 0, "k80_unconsolidated"),
    ],
)
def test_what_was_not_measured_is_refused(small: ThroughputTable, shape: Shape, job: int, words: str) -> None:
    with pytest.raises(ForetraceError, match=words):
        small.speed(two_jobs(), job, shape)


def test_unknown_models_and_pairs_are_named(small: ThroughputTable) -> None:
    with pytest.raises(ForetraceError, match=r"does not know 'C' on v100; it knows A, B"):
        small.rate("v100", "C", 1)
    with pytest.raises(ForetraceError, match="no speeds of"):
        small.pair_rates("v100", ("A", 2), ("B", 1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "no table of speeds"),
        ("{}", "no GPU type"),
        ('{"v100": {"(\'A\', 1)": {"null": -1}}}', "no speed"),
        ('{"v100": {"(\'A\', 1)": {"null": true}}}', "no speed"),
        ('{"v100": {"(\'A\', 1)": {"(\'A\', 1)": [1, 1]}}}', "under null"),
        ('{"v100": {"(\'A\', 1)": {"null": 1, "(\'A\', 1)": 2}}}', "not two speeds"),
        ('{"v100": {"__import__(\'os\').getcwd()": {"null": 1}}}', "is not written as"),
        ('{"v100": {"A": {"null": 1}}}', "is not written as"),
    ],
)
def test_damaged_files_get_a_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ForetraceError, match=words):
        ThroughputTable.read(path)


def test_cut_off_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(json.dumps(SMALL).encode())[:-20])
    for bad in (path, tmp_path / "none.json"):
        with pytest.raises(ForetraceError, match=r"damaged gzip|does not exist"):
            ThroughputTable.read(bad)


def test_the_published_tables(shared_data: Path) -> None:
    table = ThroughputTable.read(shared_data / "fleet/gavel/simulation_throughputs.json.gz")
    assert {"k80", "p100", "v100"} < set(table.alone)
    assert len(table.alone["v100"]) == 83
    # figures of fleet-scheduling.md, section 6
    assert round(table.rate("v100", "ResNet-50 (batch size 64)", 8), 1) == 17.3
    assert round(table.rate("v100", "ResNet-50 (batch size 64)", 8, together=False), 2) == 19.76
    assert all(table.rate(kind, "LM (batch size 20)", 4) > 0 for kind in ("k80", "p100", "v100"))
