"""What verify and ledger answer: sentences, the JSON contract, and text for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from foretrace.experiment.job import Assumed, Job, Outcome, Residual
from foretrace.experiment.statistics import Arm, Ratio, Verdict
from foretrace.experiment.trial import TriedPrediction
from foretrace.report import verification
from foretrace.report.jsonout import dumps, loads, schema
from foretrace.report.terminal import Terminal, render
from foretrace.report.verification import LedgerView, VerifyView
from tests.experiment.ledger_rows import make_row
from tests.report.test_jsonout import check

PLAIN = Terminal(width=120)


def make_outcome(**changes: object) -> Outcome:
    arms = {name: Arm.of([scale * x for x in (0.1, 0.101, 0.102)]) for name, scale in
            (("before", 1.0), ("after", 0.72), ("again", 1.0))}  # fmt: skip
    outcome = Outcome(
        job=Job(techniques=("mixed-precision",), model="bert"),
        techniques=("mixed-precision",),
        parameters={"mixed-precision": {"dtype": "bfloat16"}},
        recorded_s=0.1,
        trial=TriedPrediction(
            predicted=Ratio(value=0.70, low=0.66, high=0.75), measured=Ratio(value=0.72, low=0.71, high=0.73),
            same=Ratio(value=1.0, low=0.99, high=1.01), before_s=arms["before"].median_s, after=arms["after"],
            clock="cpu", seed=0, uncertain="", verdict=Verdict.COVERED, covered=True,
        ),
        assumptions=(
            Assumed(
                technique="mixed-precision", name="measured", value=1.0, low=0.93, high=1.07, unit="×",
                why="timed alone.", flag="measured", step_at_low_s=0.066, step_at_high_s=0.075,
            ),
        ),
        before=arms["before"],
        again=arms["again"],
        walls=arms,
        cpus=arms,
        stretch=1.01,
        rounds=12,
        repeated_rounds=1,
        disturbed_rounds=2,
        steps_per_block=3,
        samples_before=16,
        samples_after=32,
        losses_before=(2.0, 1.5),
        losses_after=(2.0, None),
        residual=(Residual(layer="layer1.conv2", phase="backward", predicted_s=0.01, recorded_s=0.012),),
        treated_recorded_s=0.073,
        calibrated=40,
        free_cores=1.0,
        machine={"cores": 2},
        device="a processor",
        versions={"python": "3.11.9", "torch": "2.9.0", "foretrace": "0.1.0"},
        allocator={},
        notes=("a note",),
        took_s=20.0,
    )  # fmt: skip
    own = {name: changes.pop(name) for name in list(changes) if name in TriedPrediction.__struct_fields__}
    return structs.replace(outcome, trial=structs.replace(outcome.trial, **own), **changes)


def test_the_first_sentence() -> None:
    assert verification.headline(make_outcome()) == (
        "Predicted 1.43× faster (0.700, 0.660 – 0.750 of the step), measured 1.39× faster (0.720, 0.710 – 0.730): "
        "covered, off by −2.78 %."
    )


def test_the_first_sentence_where_nothing_was_concluded() -> None:
    outcome = make_outcome(verdict=Verdict.INCONCLUSIVE, uncertain="the machine had 0.4 cores left")
    assert verification.headline(outcome).endswith("nothing can be concluded: the machine had 0.4 cores left.")
    assert verification.verify(outcome).next == "foretrace verify mixed-precision --model bert --seconds 60"
    asked = structs.replace(outcome, job=structs.replace(outcome.job, size="full", threads=2))
    assert "--model bert --size full --threads 2 --seconds 60" in verification.verify(asked).next


def test_the_first_sentence_below_the_floor() -> None:
    small = Ratio(value=0.99, low=0.985, high=0.995)
    agreed = make_outcome(measured=small, predicted=small, verdict=Verdict.NO_CHANGE)
    assert verification.headline(agreed) == (
        "Predicted 1.00 % faster (0.990, 0.985 – 0.995 of the step), measured no change above the floor of 2.00 % "
        "(0.990, 0.985 – 0.995): agrees, off by 0 %."
    )
    missed = make_outcome(measured=small, verdict=Verdict.MISSED, covered=False)
    assert ": missed, off by" in verification.headline(missed)


def test_text_for_people() -> None:
    text = render(verification.verify(make_outcome(), ledger="/x/ledger.sqlite", row="0123456789"), PLAIN)
    for part in (
        "baseline again",
        "layer1.conv2",
        "+2.00 ms",
        "samples per step: 16 → 32",
        "2, 1.5; with it 2, not finite",
        "1 round run once more",
        "row 01234567 added to /x/ledger.sqlite",
        "next: foretrace ledger --ledger /x/ledger.sqlite",
    ):
        assert part in text, text
    assert max(map(len, text.splitlines())) <= 120
    narrow = render(verification.verify(make_outcome()), Terminal(width=60))
    assert "no row was written" in narrow


def test_ledger_text() -> None:
    rows = [make_row(model=f"model{i}") for i in range(15)]
    text = render(verification.ledger(rows, source="ledger.sqlite"), PLAIN)
    assert text.startswith("15 verifications: predictions are off by 2.78 % of the step (median;")
    assert "model14" in text
    assert "model2 " not in text
    assert "3 more older rows" in text
    assert render(verification.ledger([], source="x"), PLAIN).startswith("No verification matches.")
    short = render(verification.ledger(rows, source="x", summary_only=True), PLAIN)
    assert "model14" not in short
    assert "mixed-precision" in short


@pytest.mark.parametrize("view", [
    verification.verify(make_outcome(), ledger="x", row="y"),
    verification.ledger([make_row()], source="x"),
], ids=["verify", "ledger"])  # fmt: skip
def test_answers_keep_the_contract(view: VerifyView | LedgerView) -> None:
    rules = schema(view.command)
    answer = json.loads(dumps(view))
    assert not check(answer, rules, rules["$defs"])
    assert loads(dumps(view), view.command) == view
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    general, *sections = text.split("\n## ")
    mine = next(section for section in sections if section.startswith(f"`foretrace {view.command} "))
    assert [key for key in rules["properties"] if f"`{key}`" not in mine and f"`{key}`" not in general] == []


def test_a_row_holds_the_whole_outcome() -> None:
    row = make_outcome().row()
    assert row.error == pytest.approx(0.70 / 0.72 - 1)
    assert (row.techniques, row.names, row.model, row.size) == ("mixed-precision", ("mixed-precision",), "bert", "tiny")
    assert row.arms["cpu"]["after"]["median_s"] == pytest.approx(0.72 * 0.101)
    assert row.assumptions[0]["flag"] == "measured"
    assert row.id != make_outcome().row().id
