"""Plans of splits: from recorded latencies, from those of a real model, what cannot be, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Ledger
from foretrace.experiment.statistics import Ratio, Verdict
from foretrace.serving.server import measure
from foretrace.serving.server import plan as plans
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.plan import INTERFERENCE, NOISE, SplitPlan, plan_splits, try_plan
from foretrace.serving.server.split import CoreSplit, ModelInstance
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

LATENCIES = {(1, 1): 10, (1, 2): 19, (1, 4): 37, (2, 1): 8, (2, 2): 12, (2, 4): 21, (4, 1): 9, (4, 2): 11, (4, 4): 18}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.csv"
    rows = [f"m,{threads},{batch},{latency}\n" for (threads, batch), latency in LATENCIES.items()]
    path.write_text("model,threads,batch,latency_ms\n" + "".join(rows))
    return path


def planned(path: Path, batch: int = 4, **how: Any) -> SplitPlan:
    return plan_splits(ModelSource(name="m"), batch=batch, profile=path, **how)


def test_a_recorded_profile_is_planned_with(recorded: Path) -> None:
    found = planned(recorded)
    assert found.threads == 4 and found.source is None
    assert [each.name for each in found.splits] == ["thin", "2x2:2", "1x2:2+2x1:1", "fat"]
    best, fat = found.chosen, found.named("fat")
    assert best.instances == CoreSplit.thin(4, 4) and best.latency_s == 0.010
    assert best.high_s == pytest.approx(0.010 * (1 + NOISE) * INTERFERENCE[1]) and best.low_s < best.latency_s
    assert fat is not None and fat.high_s == pytest.approx(0.018 * (1 + NOISE)), "it disturbs nobody"


def test_idle_threads_and_missing_points(recorded: Path) -> None:
    assert planned(recorded, 1).chosen.instances == CoreSplit.fat(2, 1), "two of four threads are idle"
    found = planned(recorded, 3)
    assert [each.name for each in found.rejected] == ["fat"]
    assert found.rejected[0].why == "the profile has no latency of 4 threads with batch 3"


@pytest.mark.parametrize(("how", "said"), [
    ({"batch": 64}, "no split of 64 samples over 4 threads can be predicted"),
    ({"tail": 0.99}, "`tail=0.99` needs 100 latencies of every point"),
    ({"tail": 1.0}, "`tail=1` must be from 0.5"),
    ({"tail": float("nan")}, "must be from 0.5"),
    ({"memory_limit": 1}, "does not say what weights take; leave `memory_limit=` out"),
])  # fmt: skip
def test_what_cannot_be_planned(how: dict[str, Any], said: str, recorded: Path) -> None:
    with pytest.raises(ForetraceError, match=said):
        planned(recorded, **how)


def test_the_search_uses_no_refused_point_and_fat_and_thin_stay(recorded: Path) -> None:
    (profile,) = measure.read(recorded)
    refused = (ModelInstance(1, 1), ModelInstance(2, 2), ModelInstance(4, 4))
    found = plans._planned(replace(profile, refused=refused), 4, 4, 0.5, None)
    others = [each.instances for each in found.splits if each.name not in ("fat", "thin")]
    assert found.named("fat") and found.named("thin") and others
    assert not {each for split in others for each in split.instances} & set(refused)


def test_memory_holds_so_many_instances(recorded: Path) -> None:
    (profile,) = measure.read(recorded)
    found = plans._planned(profile, 4, 4, 0.5, 2)
    assert [each.name for each in found.splits] == ["2x2:2", "fat"]
    assert [(each.name, each.why) for each in found.rejected] == [
        ("thin", "the weights of 4 instances exceed the memory, which holds 2")
    ]


def test_an_unknown_model_of_a_recorded_profile(recorded: Path) -> None:
    with pytest.raises(ForetraceError, match="has no profile of resnet; choose m"):
        plan_splits(ModelSource(name="resnet"), batch=4, profile=recorded)


def test_a_split_that_would_win_alone_is_run_before_it_is_chosen(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four instances would take 10 ms if they did not disturb each other, and take 30."""
    took = {4: 0.030, 3: 0.015, 2: 0.014, 1: 0.018}
    turns = list[list[str]]()

    def run(source: object, splits: dict[str, CoreSplit], **how: Any) -> dict[str, list[list[float]]]:
        turns.append(list(splits))
        return {name: [[took[len(split)] * each] for each in (0.98, 1, 1.02)] for name, split in splits.items()}

    monkeypatch.setattr(measure, "run_in_turns", run)
    found = plans._with_interference(replace(planned(recorded), source=ModelSource(name="m")), print)
    assert turns == [["thin", "fat", "2x2:2", "1x2:2+2x1:1"]]
    assert [each.name for each in found.splits] == ["2x2:2", "1x2:2+2x1:1", "fat", "thin"]
    assert found.chosen.interference == pytest.approx(14 / 12) and found.splits[-1].interference == pytest.approx(3)
    ratio = found.chosen.over_fat
    assert ratio is not None and found.splits[-1].over_fat is not None
    assert ratio.value == pytest.approx(14 / 18) and ratio.high - ratio.value > 0.019 < ratio.value - ratio.low

    monkeypatch.setattr(plans, "_MOST_RUN", 3)
    found = plans._with_interference(replace(planned(recorded), source=ModelSource(name="m")), print)
    assert turns[1] == ["thin", "fat", "2x2:2"]
    assert [each.name for each in found.splits] == ["2x2:2", "fat", "thin", "1x2:2+2x1:1"], "what ran comes first"


def test_a_row_of_the_ledger_holds_the_comparison(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"fat": 0.018, "again": 0.018, "alone": 0.015, "thin": 0.012}
    monkeypatch.setattr(
        measure, "run_in_turns", lambda source, splits, **how: {name: [[took[name]]] * 2 for name in splits}
    )
    plan = replace(planned(recorded), source=ModelSource(name="m", size="tiny"))
    best = msgspec.structs.replace(plan.chosen, over_fat=Ratio(value=0.6, low=0.5, high=0.7))
    trial, row = try_plan(replace(plan, splits=(best, *plan.splits[1:])), seconds=1)
    assert trial.verdict == Verdict.COVERED and (trial.after, trial.quickest) == ("thin", "thin")
    assert trial.over_alone is not None and trial.over_alone.value == pytest.approx(0.8)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add([row])
    (row,) = ledger.rows()
    assert (row.before_s, row.after_s, row.covered, row.threads) == (0.018, 0.012, True, 4)
    assert row.arms["serve"]["quickest"] == row.arms["serve"]["chosen"] == "thin"
    assert row.names == ("serve-split",) and row.error == pytest.approx(-0.1)


def test_a_recorded_profile_cannot_be_run(recorded: Path) -> None:
    with pytest.raises(ForetraceError, match="leave `run=` out"):
        try_plan(planned(recorded), seconds=1)


def test_a_real_model_is_planned_run_and_written_down(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(measure, "ATTEMPTS", 1)
    monkeypatch.setattr(measure, "MOST_SPREAD", 1e9)
    monkeypatch.setattr(plans, "_RUN_S", 0.1)
    ledger = tmp_path / "ledger.sqlite"
    words = ["serve", "plan", "ncf", "--size", "tiny", "--batch", "4", "--profile", tmp_path / "ncf.csv"]
    found = cli(*words, "--run", "--seconds", "0.1", "--ledger", ledger, "--json")
    threads = found.json["threads"]
    if threads == 1:  # nothing to split
        assert found.code == 2
        return
    assert found.code == 0, found.err
    assert {each["name"] for each in found.json["splits"]} >= {"fat", "thin"}
    assert found.json["chosen"]["interference"] > 0 and found.json["trial"]["verdict"]
    assert found.json["next"] == f"foretrace serve ncf --size tiny --split {found.json['chosen']['split']}"
    assert len(Ledger(ledger).rows()) == 1
    text = cli(*words).out
    assert "per batch of 4" in text and "over fat" in text
    small = cli(*words, "--memory-limit", "1kb")
    assert small.code == 2 and "give more --memory-limit" in small.err


def test_the_command_plans_from_recorded_latencies(cli: Cli, recorded: Path) -> None:
    found = cli("serve", "plan", "m", "--batch", "4", "--profile", recorded, "--json").json
    assert found["chosen"]["split"] == "4x1:1" and found["next"] == ""
    text = cli("serve", "plan", "m", "--batch", "4", "--profile", recorded).out
    assert "4 × (1 thread, batch 1): 10.0 ms (9.00 – 16.5) per batch of 4; 1.80× faster than one instance" in text


def test_mistakes_are_one_sentence(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    unknown = cli("serve", "plan", "resnett", "--batch", "4", "--profile", tmp_path / "new.csv")
    assert unknown.code == 2 and "resnet50" in unknown.err and unknown.err.count("\n") == 1
    many = cli("serve", "plan", "ncf", "--size", "tiny", "--batch", "4", "--threads", "4096")
    assert many.code == 2 and "--threads 4096: this process may use" in many.err
    missing = cli("serve", "plan", "gone.onnx", "--batch", "4")
    assert missing.code == 2 and "gone.onnx does not exist" in missing.err
