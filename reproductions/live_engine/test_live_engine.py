"""A live engine: the tokens of every request are the decoder's own, whatever shares its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Ledger
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.requests import Requests, requests
from reproductions.live_engine.decoder import Chunk, DecoderSize, PagedDecoder
from reproductions.live_engine.engine import LiveEngine
from reproductions.live_engine.protocol import calibrate, figures_of, measure_steps, verify

SIZE = DecoderSize(layers=2, width=32, heads=4, kv_heads=2, vocabulary=97)
RULES = EngineRules(sequences=6, token_budget=32, watermark=0.0, prefix_cache=False)
TRIAL = "closed concurrency=6 prompt=3-40 output=5-40 requests=14"


@pytest.fixture(scope="module")
def engine() -> LiveEngine:
    """An engine whose cache is so small that sequences are preempted; in float64, so that ties do not occur."""
    made = LiveEngine(SIZE, blocks=12)
    made.decoder = PagedDecoder(SIZE, 12, dtype=torch.float64)
    return made


def alone(decoder: PagedDecoder, prompt: list[int], count: int) -> list[int]:
    """Tokens that follow a prompt, each from the whole text at once."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(decoder([Chunk(text, 0, range(12))]).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("policy", ["chunked", "prefill-first", "orca", "static"])
def test_tokens_are_the_decoders_own(engine: LiveEngine, policy: str) -> None:
    trial = requests(TRIAL, seed=2)
    run = engine.serve(trial, replace(RULES, policy=policy), seed=5)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(SIZE.vocabulary, size=n).tolist() for n in trial.prompt]
    assert run.served.emitted == trial.output.sum()
    for prompt, tokens, output in zip(prompts, run.tokens, trial.output, strict=True):
        assert list(tokens) == alone(engine.decoder, prompt, int(output))
    if policy in ("chunked", "prefill-first"):
        assert run.served.preemptions > 0  # else this shows nothing about computing again


def test_simulator_makes_the_same_steps(engine: LiveEngine) -> None:
    """With all requests there at once nothing depends on the clock: the same steps, with the same in them."""
    trial = requests("burst prompt=3-40 output=5-40 requests=14", seed=3)
    steps = measure_steps(engine, RULES, longest=80)
    real = engine.serve(trial, RULES, steps=steps)
    served = simulate(trial, steps, replace(RULES, utilisation=1.0), log=10_000)
    assert served.preemptions == real.served.preemptions > 0
    for column in ("members", "tokens", "prompts", "decodes", "context", "used", "waiting", "evicted"):
        assert served.log[column].tolist() == real.served.log[column].tolist()
    assert len(real.expected_s) == len(real.step_s) == served.steps
    calibrated = calibrate(steps, real)
    assert calibrated.table.low <= 1 <= calibrated.table.high
    assert set(figures_of(served)) == {"ttft.p50", "ttft.p90", "tpot.p50", "tpot.p90"}


def test_verification_leaves_rows(engine: LiveEngine, tmp_path: Path) -> None:
    found = verify(engine, RULES, runs=3, number=6, seed=1, lengths="prompt=3-40 output=5-40")
    assert list(found.figures) == ["ttft.p50", "ttft.p90", "tpot.p50", "tpot.p90"]
    for each in found.figures.values():
        assert each.predicted.low <= 1 <= each.predicted.high
        assert each.error == pytest.approx(1 / each.measured.value - 1)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.add(found.rows()) == 4
    kept = ledger.rows()
    assert {row.names for row in kept} == {("serve-llm",)}
    assert [row.covered for row in kept] == [each.covered for each in found.figures.values()]


@pytest.mark.parametrize(
    ("rules", "trial", "said"),
    [
        (replace(RULES, block=8), requests(TRIAL), "blocks of 16 tokens"),
        (replace(RULES, preemption="swap"), requests(TRIAL), "computes again"),
        (RULES, requests("burst prompt=300 output=9 requests=2"), "needs `blocks=20`, got 12"),
    ],
)
def test_what_a_live_engine_cannot(engine: LiveEngine, rules: EngineRules, trial: Requests, said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        engine.serve(trial, rules)


def test_too_few_runs(engine: LiveEngine) -> None:
    with pytest.raises(ForetraceError, match="`runs=` must be 3 or more"):
        verify(engine, RULES, runs=2)
    with pytest.raises(ForetraceError, match="`load=` must be above 0"):
        verify(engine, RULES, load=float("nan"))
