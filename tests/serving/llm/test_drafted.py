"""Engines that decode with a draft: tokens conserved, what is accepted, when it hurts, and what cannot be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cli.app import run as command
from foretrace.errors import ForetraceError
from foretrace.serving import requests as served
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.drafted import drafted_steps, read_draft
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.llm.served_model import served_model
from foretrace.serving.llm.simulation import SimulationConfig, simulated
from foretrace.serving.llm.step_times import HIGH, LOW, MIDDLE
from foretrace.serving.speculative.drafts import modelled_rounds
from foretrace.serving.speculative.rounds import speculated
from foretrace.techniques.compute.acceptance import Acceptance
from tests.serving.llm.step_cases import constant

TARGET = served_model("llama-2-7b")
LARGE, SMALL = (step_times(each, "h100") for each in (TARGET, read_draft("2x1024", TARGET)))
ASK = SimulationConfig(model="llama-2-7b", device="h100", asked="poisson qps=2 prompt=100 output=100", seconds=15)


@settings(max_examples=50)
@given(
    rate=st.sampled_from([0.0, 0.3, 0.7, 1.0]), k=st.integers(1, 8), n=st.integers(1, 12), output=st.integers(2, 90),
    policy=st.sampled_from(["chunked", "prefill-first", "orca", "static"]),
)  # fmt: skip
def test_tokens_are_conserved(rate: float, k: int, n: int, output: int, policy: str) -> None:
    """Each request gets what it wants, and nothing else is kept; with all accepted, rounds are as few as can be."""
    times = constant(1.0, accepted=tuple(rate**i for i in range(1, k + 1)))
    found = simulate(served.of([0.0] * n, [5] * n, [output] * n), times, EngineRules(policy=policy))
    assert found.emitted == n * output and found.gaps.sum() == n * (output - 1)
    assert found.computed == n * (output + 4)
    if rate in (0.0, 1.0):
        assert found.steps == 1 + -(-(output - 1) // (1 + k * int(rate)))


@pytest.mark.parametrize("text", ["0.7", "0.9", "30/12/8/50"])
def test_rounds_emit_what_is_accepted(text: str) -> None:
    accepted, output = Acceptance.of(text), 20_000
    times = constant(1.0, accepted=accepted.survivals(3))
    found = simulate(served.of([0.0], [1], [output]), times, EngineRules(block=64))
    assert (output - 1) / (found.steps - 1) == pytest.approx(accepted.tokens(3).value, rel=0.02)


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_round_takes_what_the_closed_form_says(batch: int) -> None:
    """A whole batch, decoded with a draft and without: the speed-up of `speculative/rounds.py`, batch by batch."""
    accepted, k, tokens = Acceptance.of("0.7"), 4, 400
    asked = served.of([0.0] * batch, [500] * batch, [tokens] * batch)
    drafted = drafted_steps(LARGE, SMALL, accepted, k)
    took = []
    for times in (LARGE, drafted):
        run = simulate(asked, times, EngineRules(token_budget=4096, sequences=batch))
        took.append(float((run.finish_s - run.first_s).mean()))
    said = speculated(modelled_rounds(LARGE, SMALL, batch=batch, context=700), accepted, k)
    assert took[0] / took[1] == pytest.approx(said.speedup, rel=0.1)


@given(batch=st.sampled_from([1, 8, 64, 512]), k=st.integers(1, 8), context=st.sampled_from([64, 2048]))
def test_nothing_accepted_is_slower_than_no_draft(batch: int, k: int, context: int) -> None:
    none = drafted_steps(LARGE, SMALL, Acceptance.of("0"), k).table
    at = int(np.searchsorted(none.batch, batch)), int(np.searchsorted(none.mean_context, context))
    assert none.decode_s[at] > LARGE.table.decode_s[at]
    assert drafted_steps(LARGE, SMALL, Acceptance.of("0-0"), k, LOW).accepted == (0.0,) * k


def test_ends_of_the_range_are_in_order() -> None:
    quick, middle, slow = (drafted_steps(LARGE, SMALL, Acceptance.of("0.6-0.8"), 4, end) for end in (LOW, MIDDLE, HIGH))
    assert quick.accepted > middle.accepted > slow.accepted
    assert (quick.table.decode_s <= middle.table.decode_s).all() and (
        middle.table.decode_s <= slow.table.decode_s
    ).all()
    assert middle.kv_bytes_per_token > LARGE.kv_bytes_per_token and middle.weight_bytes > LARGE.weight_bytes


@pytest.mark.parametrize("ask", [{"acceptance": "0.8"}, {"acceptance": "0"}])
def test_a_simulation_says_what_the_draft_gains(ask: dict[str, Any]) -> None:
    found = simulated(SimulationConfig(**(vars(ASK) | {"draft": "2x1024"} | ask)))
    assert found.plain is not None
    own, plain = (each.latencies["tpot"].p50.value for each in (found.figures, found.plain))
    assert own is not None and plain is not None and (own < plain) == (ask["acceptance"] == "0.8")
    assert found.run.emitted == found.requests.output.sum()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"k": 0}, "k=0 proposes nothing"),
        ({"k": 65}, "at most 64"),
        ({"acceptance": "1.5"}, "must be shares from 0 to 1"),
        ({"draft": "llama-2-13b"}, "must be smaller than its target"),
        ({"draft": "llama-3-8b"}, "must have the target's vocabulary"),
        ({"draft": "0x2048"}, "LAYERSxWIDTH such as 4x2048 .*, got 0x2048"),
        ({"draft": "4by2048"}, "got 4by2048; give one.$"),
        ({"draft": "99999x999999"}, "got 99999x999999; give one.$"),
        ({"layout": {"pp": 2}}, "without a pipeline"),
    ],
)
def test_what_cannot_be(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        simulated(SimulationConfig(**(vars(ASK) | {"draft": "2x1024"} | more)))


@pytest.mark.parametrize("more", [["--k", "3"], ["--k", "4"], ["--acceptance", "0.7"]])
def test_what_is_about_a_draft_needs_one(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["llm", "simulate", "llama-2-7b", "--device", "h100", *more]) == 2
    said = capsys.readouterr().err
    assert f"{more[0]} is about a draft" in said and "--draft 4x2048" in said and said.count("\n") <= 2


def test_command_shows_where_it_hurts(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "llm simulate llama-2-7b --device h100 --seconds 10 --draft 2x1024 --acceptance 0.36".split()  # noqa: SIM905
    asked += ["--requests", "poisson qps=2 prompt=500 output=200", "--grid", "400"]
    assert command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    gains = [each["speedup"] for each in found["speculation"]["by_batch"]]
    assert gains[0] > 1 > gains[-1], "reading weights is shared, arithmetic is not"
    energy = found["energy"]
    assert energy["interval_j"][0] < energy["energy_j"] < energy["interval_j"][1] and energy["co2_g"] > 0
    assert command(asked) == 0
    assert "hurts from batch" in capsys.readouterr().out
