"""The table is cleaned as its rules say, and the closed loop of the fit agrees with the engine simulator."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.llm.metrics import measure
from foretrace.serving.llm.step_law import Layout
from foretrace.serving.requests import of
from reproductions.__main__ import main
from reproductions.aiconfigurator.closed_loop import OTHERS, SEQUENCES, TOKENS, play
from reproductions.aiconfigurator.model import DEFAULTS, Aggregated, fitted
from reproductions.aiconfigurator.sample import mended, read
from reproductions.aiconfigurator.study import SPLITS, HeldOut, by_one_run, ranges


@pytest.mark.parametrize(("sizes", "layout", "changed"), [
    ((8, 1, 8, 1), Layout(tp=8, dp=1, ep=1), False),
    ((64, 1, 8, 8), Layout(tp=8, dp=1, ep=8), True),
    ((1, 64, 8, 8), Layout(tp=1, dp=8, ep=8), True),
    ((4, 4, 1, 16), Layout(tp=4, dp=1, ep=4), True),
    ((1, 8, 1, 8), Layout(tp=1, dp=8, ep=8), False),
    ((4, 1, 2, 2), Layout(tp=2, dp=1, ep=2), True),
])  # fmt: skip
def test_multiplied_sizes_are_divided_again(
    sizes: tuple[int, int, int, int], layout: Layout, changed: bool
) -> None:  # fmt: skip
    assert mended(*sizes) == (layout, changed)


def test_the_table_is_cleaned(shared_data: Path) -> None:
    found = read(shared_data / "serving" / "aiconfigurator" / "silicon_sample.csv.gz")
    rows = [*found.aggregated, *found.disaggregated]
    assert len({(f"{one.ttft_s:.6g}", f"{one.tpot_s:.6g}") for one in rows}) == len(rows), "no measurement twice"
    assert {one.architecture for one in rows if "dsr1" in one.id or "deepseek" in one.id} == {"deepseek-v3"}
    assert max(one.layout.devices for one in found.aggregated) == 8
    assert found.notes["rows"] == 3246 and all(one.prefill_workers for one in found.disaggregated)


def test_a_file_that_is_no_such_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(tmp_path / "silicon_sample.csv.gz", "wt") as file:
        file.write("id,backend\n1,vllm\n")
    assert main(["aiconfigurator", "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is no table of measured servers" in said and said.count("\n") == 1
    with pytest.raises(ForetraceError, match="every column"):
        (tmp_path / "empty.csv").write_text("")
        read(tmp_path / "empty.csv")


@pytest.mark.parametrize("clients", [1, 8, 48])
@pytest.mark.parametrize(("prompt", "output"), [(1024, 256), (4096, 64)])
def test_the_closed_loop_agrees_with_the_engine(clients: int, prompt: int, output: int) -> None:
    """Means of TTFT and TPOT on the grids of a real deployment, whole chunks, a cache that holds all."""
    steps = replace(step_times("llama-3-8b", "h100"), request_s=0.0)  # the loop counts it by itself
    t, random = steps.table, np.random.default_rng(clients)
    prompts = np.round(prompt * random.uniform(0.8, 1, 6 * clients)).astype(np.int64)
    outputs = np.round(output * random.uniform(0.8, 1, 6 * clients)).astype(np.int64)
    per_context = float(t.decode_s[3, 9] / (t.batch[3] * t.mean_context[9]))
    per_pair = float(t.prefill_s[20, 0] / (t.chunk[20] ** 2 / 2))
    made = play(t.tokens, t.sequences, prompts, outputs, clients, 256, 1e9, 2048, True, 1, 1, 0, 1 / 6)
    others = [per_context, per_pair, t.host_s, t.host_per_sequence_s]
    tpot, ttft = made @ np.concatenate([t.linear_s, t.output_s, others])
    asked = of(np.zeros(len(prompts)), prompts, outputs, concurrency=clients)
    figures = measure([simulate(asked, steps, EngineRules(token_budget=2048))], steps)
    assert tpot == pytest.approx(figures.latencies["tpot"].mean.value, rel=0.03)
    assert ttft == pytest.approx(figures.latencies["ttft"].mean.value, rel=0.08)


@given(clients=st.integers(1, 20), slots=st.integers(1, 20), budget=st.integers(1, 300), mixed=st.booleans(),
       poll=st.integers(1, 40), gather=st.integers(1, 4), wait=st.integers(0, 60),
       capacity=st.floats(1, 5000))  # fmt: skip
def test_no_request_of_a_closed_loop_is_lost(
    clients: int, slots: int, budget: int, mixed: bool, poll: int, gather: int, wait: int, capacity: float
) -> None:
    """Where prompts join steps of decoding, every step but the first gives each request a token."""
    random = np.random.default_rng(clients)
    prompts, outputs = random.integers(1, 200, 60), random.integers(2, 50, 60)
    made = play(TOKENS, SEQUENCES, prompts, outputs, clients, slots, capacity, budget, mixed, poll, gather, wait, 0.1)
    tpot, ttft = made[:, -OTHERS:]
    assert tpot[2] == pytest.approx(1.0) if mixed else tpot[2] > 1 - 1e-9
    assert ttft[2] > 1 - 1e-9 and (made > -1e-9).all()
    weights = np.where(np.arange(60) < clients, 0.1 / clients, 0.9 / (60 - clients))
    assert ttft[1] > 0.999 * weights @ prompts**2 / 2, "a request waits for its own prompt at the least"


def test_a_fit_finds_the_law_that_made_the_rows(shared_data: Path) -> None:
    table = read(shared_data / "serving" / "aiconfigurator" / "silicon_sample.csv.gz")
    rows = [one for one in table.aggregated if one.clients <= 16][::24]
    made = Aggregated(rows)
    moved = DEFAULTS.copy()
    moved[-4:] += 0.3
    made.measured = made.predict(moved[None])[0]
    before = np.abs(made.predict(DEFAULTS[None]) - made.measured).mean()
    after = np.abs(made.predict(fitted(made, 1e-4)[None]) - made.measured).mean()
    assert after < before / 5


def test_ranges_hold_what_other_groups_missed() -> None:
    random = np.random.default_rng(0)
    groups = tuple(f"g{i // 40}" for i in range(800))
    found = HeldOut(rows=(), groups=groups, errors=random.normal(0, 0.1, (800, 2)))
    lies = ranges(found)
    assert all(0.74 < held < 0.86 for held in lies.held), "80 % of rows, where groups are alike"
    assert lies.low[0] == pytest.approx(np.exp(-0.128), abs=0.02)


def test_one_run_takes_a_servers_own_level_away(shared_data: Path) -> None:
    rows = read(shared_data / "serving" / "aiconfigurator" / "silicon_sample.csv.gz").aggregated
    levels = {one.deployment: 0.4 * (i % 5 - 2) for i, one in enumerate(rows)}
    errors = np.array([[levels[one.deployment]] * 2 for one in rows])
    found = HeldOut(rows=rows, groups=tuple(map(SPLITS["system"], rows)), errors=errors)
    assert np.abs(by_one_run(found).errors).max() < 1e-12


@pytest.mark.slow("fits the law to every eighth row, once for each group left out")
def test_the_protocol_in_small(shared_data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = shared_data / "serving" / "aiconfigurator" / "silicon_sample.csv.gz"
    with gzip.open(source, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["backend"] == "vllm"]
    with gzip.open(tmp_path / "silicon_sample.csv.gz", "wt") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert main(["aiconfigurator", "--data", str(tmp_path), "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["aggregated, (architecture, system)"]
    assert told["rows"] > 40 and told["tpot"] < 0.3 and told["ttft"] < 0.6
