"""Energy beside a time: its range, what widens it, and that nothing is shown where no power is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.cli.app import run as command
from foretrace.hardware.devices import named
from foretrace.hardware.power import SERVING_SHARES, step_energy
from reproductions import ROOT

V100 = named("v100")


@given(busy=st.floats(0, 1), wide=st.floats(0, 0.5), slower=st.floats(1, 3))
def test_ranges_hold_the_middle_and_widen(busy: float, wide: float, slower: float) -> None:
    known = step_energy(V100, 1.0, (1.0, 1.0), busy, 4)
    less = step_energy(V100, 1.0, (1 / slower, slower), busy, 4, busy_range=(busy - wide, busy + wide))
    serving = step_energy(V100, 1.0, (1.0, 1.0), busy, 4, working=SERVING_SHARES)
    assert known is not None and less is not None and serving is not None
    (value, (low, high), _), (same, (least, most), _) = known, less
    assert least <= low < value == same < high <= most <= 4 * V100.tdp_w * slower * (1 + 1e-12)
    assert serving[1][0] <= low and serving[1][1] == pytest.approx(high)
    assert step_energy(named("tpu-v5e"), 1.0, (1.0, 1.0), busy) is None


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert command([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "time", "boards"),
    [
        ("plan transformer gpt2-xl --devices 16 --batch 64", lambda found: found["best"]["step_s"], 16),
        ("plan pipeline bert --size tiny --devices 2", lambda found: found["schedules"][0]["batch_s"], 2),
        ("plan place bert --size tiny --devices 2 --inference", lambda found: found["objective_value"], 2),
        ("llm simulate llama-2-7b --seconds 5", lambda found: found["seconds"]["value"], 1),
    ],
)
def test_joules_stand_beside_seconds(
    capsys: pytest.CaptureFixture[str], words: str, time: Any, boards: int
) -> None:  # fmt: skip
    found = answer(capsys, *words.split(), "--device", "a100-80gb", "--grid", "400")
    energy, (low, high) = found["energy"], found["energy"]["interval_j"]
    assert low < energy["energy_j"] < high and energy["grid_g_per_kwh"] == 400
    assert energy["co2_g"] == pytest.approx(energy["energy_j"] / 3.6e6 * 400)
    watts = energy["energy_j"] / time(found) / boards
    assert 0.15 * named("a100-80gb").tdp_w <= watts <= named("a100-80gb").tdp_w
    if words.startswith(("plan transformer", "llm")):
        assert answer(capsys, *words.split(), "--device", "tpu-v5p")["energy"] is None


def test_a_fleet_tells_kilowatt_hours_with_their_range(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fleet", "run", str(ROOT / "examples" / "jobs.csv"), "--cluster", "2x4x8@v100"]
    found = answer(capsys, *words, "--grid", "400")
    low, high = found["energy"]["interval_j"]
    assert low < found["energy"]["energy_j"] <= high
    assert found["energy"]["energy_j"] == pytest.approx(3.6e6 * found["kwh"])
    assert answer(capsys, *words[:-1], "2x4x8")["energy"] is None
