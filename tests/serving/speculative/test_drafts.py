"""The search of drafts, and what cannot be one."""

from __future__ import annotations

import json

import pytest

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.drafted import draft_like
from foretrace.serving.llm.served_model import served_model
from foretrace.serving.speculative.drafts import DraftSetting, modelled_rounds, search_drafts, timed_draft

SETTING = DraftSetting(target=served_model("llama-2-70b"), device="h100", layout={"tp": 4})


def test_shallow_drafts_are_quicker_at_equal_acceptance() -> None:
    found = search_drafts(SETTING, acceptance="0.7", parameters=1e9)
    assert all(each.parameters <= 1e9 for each in found)
    assert [each.speedup for each in found] == sorted((each.speedup for each in found), reverse=True)
    by_width = sorted((each for each in found if each.width == 2048), key=lambda each: each.layers)
    latencies = [each.latency_s for each in by_width]
    assert len(latencies) > 3 and latencies == sorted(latencies)
    for each in found:
        assert each.speedup_low <= each.speedup <= each.speedup_high
        assert each.latency_low_s < each.latency_s < each.latency_high_s
        assert (each.latency_s < each.must_be_below_s) == (each.speedup > 1)


def test_a_limit_of_latency_is_kept() -> None:
    found = search_drafts(SETTING, latency_s=1.2e-3)
    assert found and max(each.latency_s for each in found) <= 1.2e-3


def test_batches_make_verifying_dear() -> None:
    target, small = (
        step_times(each, "h100") for each in (served_model("llama-2-7b"), draft_like(SETTING.target, 2, 1024))
    )
    grown = {n: modelled_rounds(target, small, batch=n, context=512).verify_s for n in (1, 64, 512)}
    growth = [each[8] / each[0] for each in grown.values()]
    assert growth == sorted(growth) and growth[0] < 1.2 < growth[-1]


def test_what_is_no_draft() -> None:
    with pytest.raises(
        ForetraceError, match="knows 128,256 tokens and llama-2-70b 32,000; a draft must have the target's"
    ):
        timed_draft(SETTING, served_model("llama-3-8b"))
    with pytest.raises(ForetraceError, match="must be smaller than its target"):
        timed_draft(DraftSetting(target=served_model("llama-2-7b"), device="h100"), served_model("llama-2-13b"))
    with pytest.raises(ForetraceError, match="fits the budget"):
        search_drafts(SETTING, parameters=1e6)
    with pytest.raises(ForetraceError, match=r"does not fit with 1,024 tokens: a device has 85\.9 GB for 138 GB"):
        search_drafts(DraftSetting(target=served_model("llama-2-70b"), device="h100"))
    with pytest.raises(ForetraceError, match="without a pipeline"):
        DraftSetting(target=SETTING.target, device="h100", layout={"pp": 2})
    with pytest.raises(ForetraceError, match="must be 1 or more, got 0"):
        DraftSetting(target=SETTING.target, device="h100", batch=0)
    with pytest.raises(ForetraceError, match="at most 64"):
        DraftSetting(target=SETTING.target, device="h100", k=99)


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "llm",
        "draft",
        "llama-2-70b",
        "--device",
        "h100",
        "--tp",
        "4",
        "--parameters",
        "5e8",
        "--k",
        "3",
        "--json",
    ]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"layers", "width", "latency_s", "tau", "speedup"} <= set(found["drafts"][0])
    assert {each["k"] for each in found["drafts"]} == {3}
