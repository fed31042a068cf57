"""The page's figures on the small sample, and the claims that stand on the traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from energy_tune import trainings
from foretrace.serving.energy import recorded
from reproductions import ROOT
from reproductions.polythrottle.protocol import enumerated, saved


def test_optima_of_the_sample() -> None:
    training = recorded.read([f"zeus:{ROOT / 'tests' / 'data' / 'energy'}", "workload=squad"])
    assert enumerated(training)[0] == "49"
    assert enumerated(training)[3] == "batch=12 gpu-power-limit=200: 1,341,226 J, 7,157.6 s"


def test_what_is_saved(shared_data: Path) -> None:
    traces = shared_data / "energy" / "zeus"
    if not traces.is_dir():
        pytest.skip(f"no traces of Zeus at {traces}")
    against_fastest = [saved(each)[1] for each in trainings(traces).values()]
    assert min(against_fastest) > 0.036 and max(against_fastest) == pytest.approx(0.452, abs=1e-3)


def test_without_traces_one_sentence(tmp_path: Path) -> None:
    from reproductions.__main__ import main as reproduce

    assert reproduce(["polythrottle", "--shared-data", str(tmp_path)]) == 2
