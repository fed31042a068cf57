"""Decoding with a draft changes nothing: by enumeration, by a test on samples, and token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import sleep

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from foretrace.errors import ForetraceError
from foretrace.experiment.statistics import Ratio
from foretrace.serving.speculative.rounds import speculated
from reproductions.speculative import measuring, protocol
from reproductions.speculative.decoder import Cached, Counts, Decoder, DecoderShape, Ngram, Predictor
from reproductions.speculative.decoding import Dice, decode, decode_speculatively
from reproductions.speculative.measuring import calibrated, record_decoding, round_times, take_turns
from reproductions.speculative.protocol import judged
from reproductions.speculative.study import study_table
from reproductions.speculative.training import trained

VOCABULARY = 3
TEXT = b"import os\nfor each in range(9):\n    print(each, os.name)\n" * 20


class Enumerated:
    """Chance that takes every way through a program, one after the other, and knows how likely each is."""

    def __init__(self) -> None:
        self.path: list[tuple[int, int]] = []  # what was chosen, of how many
        self.at, self.weight = 0, 1.0

    def _choose(self, weights: Sequence[float]) -> int:
        if self.at == len(self.path):
            self.path.append((0, len(weights)))
        chosen = self.path[self.at][0]
        self.at += 1
        self.weight *= weights[chosen]
        return chosen

    def draw(self, probabilities: Tensor) -> int:
        shares = (probabilities / probabilities.sum()).tolist()
        return self._choose(shares)

    def happens(self, probability: float) -> bool:
        likely = min(probability, 1.0)
        return likely == 1.0 or self._choose([likely, 1 - likely]) == 0

    def next_way(self) -> bool:
        self.at, self.weight = 0, 1.0
        while self.path:
            chosen, of = self.path.pop()
            if chosen + 1 < of:
                self.path.append((chosen + 1, of))
                return True
        return False


def small(layers: int, seed: int, vocabulary: int = VOCABULARY) -> Cached:
    model = Decoder(DecoderShape(layers=layers, width=16, vocabulary=vocabulary), seed=seed).double()
    with torch.no_grad():
        model.head.weight *= 6
    cached = Cached(model.requires_grad_(False))
    cached.caches = cached.caches.double()
    return cached


class Recalled:
    """A decoder that computes every text once: all paths and samples here read the same few."""

    def __init__(self, model: Cached) -> None:
        self.model, self.vocabulary = model, model.vocabulary
        self.read: list[int] = []
        self.known: dict[tuple[int, ...], Tensor] = {}

    @property
    def length(self) -> int:
        return len(self.read)

    def keep(self, length: int) -> None:
        del self.read[length:]

    def feed(self, tokens: Sequence[int]) -> Tensor:
        rows = []
        for token in tokens:
            self.read.append(token)
            if (text := tuple(self.read)) not in self.known:
                self.model.keep(0)
                self.known[text] = self.model.feed(text)[-1]
            rows.append(self.known[text])
        return torch.stack(rows)


def exact(target: Cached, prompt: list[int], count: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, by the target alone, without a cache."""
    found = {}
    for tail in product(range(VOCABULARY), repeat=count):
        rows = torch.softmax(target.model(torch.tensor([[*prompt, *tail]]))[0], -1)
        steps = range(len(prompt) - 1, len(prompt) + count - 1)
        found[tail] = float(np.prod([float(rows[at, token]) for at, token in zip(steps, tail, strict=True)]))
    return found


@pytest.mark.parametrize(("k", "count"), [(1, 3), (2, 2)])
def test_every_continuation_is_as_likely_as_without_a_draft(k: int, count: int) -> None:
    target, draft, prompt = small(2, 0), small(1, 1), [0, 2, 1]
    wanted, models = exact(target, prompt, count), (Recalled(target), Recalled(draft))
    chance, found, apart = Enumerated(), Counter[tuple[int, ...]](), 0.0
    while True:
        run = decode_speculatively(*models, prompt, count, k, chance)
        found[tuple(run.tokens[:count])] += chance.weight  # type: ignore[assignment]
        apart = max(apart, float(sum(run.accepted) < k * len(run.accepted)))
        if not chance.next_way():
            break
    assert apart, "every proposal was accepted, so this shows nothing"
    assert sum(found.values()) == pytest.approx(1)
    for tail, probability in wanted.items():
        assert found[tail] == pytest.approx(probability, abs=1e-9)


def test_samples_follow_the_target() -> None:
    """χ² of 800 pairs of tokens; a wrong rule (accept always) is found by the same test."""
    target, draft, prompt = small(2, 0), small(1, 1), [0, 2, 1]
    wanted, models = exact(target, prompt, 2), (Recalled(target), Recalled(draft))

    def statistic(chance: Dice) -> float:
        found = Counter(tuple(decode_speculatively(*models, prompt, 2, 2, chance).tokens[:2]) for _ in range(800))
        return sum((found[tail] - 800 * p) ** 2 / (800 * p) for tail, p in wanted.items())

    class Gullible(Dice):
        def happens(self, probability: float) -> bool:
            return True

    limit = 26.1  # 99.9 % of χ² with 8 degrees of freedom
    assert statistic(Dice(1)) < limit < statistic(Gullible(1))


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, Decoder]:
    """A target and a draft of few steps."""
    shapes = ((DecoderShape(layers=2, width=32), 30, 0), (DecoderShape(layers=1, width=32), 10, 1))
    target, draft = (trained(shape, TEXT, steps, seed=seed)[0] for shape, steps, seed in shapes)
    return target, draft


@pytest.mark.parametrize("k", [1, 3, 5])
def test_greedy_decoding_says_the_same(k: int, pair: tuple[Decoder, Decoder]) -> None:
    text, (model, other) = TEXT[:400], pair
    target = Cached(model, temperature=0)
    for draft in (Cached(other, temperature=0), Ngram(Counts(TEXT), temperature=0)):
        plain = decode(target, list(text[:20]), 40, Dice(0)).tokens
        run = decode_speculatively(target, draft, list(text[:20]), 40, k, Dice(0))
        assert run.tokens[:40] == plain
        assert len(run.tokens) == sum(run.accepted) + len(run.accepted)


def test_a_cache_says_what_the_whole_text_does() -> None:
    cached, tokens = small(2, 0), [0, 1, 2, 2, 1, 0, 1]
    whole = torch.softmax(cached.model(torch.tensor([tokens]))[0], -1)
    cached.feed(tokens[:3])
    cached.feed([2, 2, 2])
    cached.keep(3)
    assert torch.allclose(torch.cat([cached.feed(tokens[3:5]), cached.feed(tokens[5:])]), whole[3:])


def test_counts_are_probabilities() -> None:
    ngram = Ngram(Counts(TEXT, order=3))
    rows = ngram.feed(list(b"for q"))
    assert torch.allclose(rows.sum(1), torch.ones(5)) and (rows > 0).all()
    assert int(rows[1].argmax()) == ord("r")


def test_what_cannot_be_decoded() -> None:
    with pytest.raises(ForetraceError, match="must be 1 or more, got 0"):
        decode_speculatively(small(1, 0), small(1, 1), [0], 2, 0, Dice(0))
    with pytest.raises(ForetraceError, match="the draft knows 4 tokens and the target 3"):
        decode_speculatively(small(1, 0), small(1, 1, vocabulary=4), [0], 2, 1, Dice(0))


def test_a_trial_from_training_to_rows() -> None:
    """The protocol's parts on models of a few steps."""
    model, loss = trained(DecoderShape(layers=2, width=32), TEXT, 20)
    target, draft = Cached(model), Ngram(Counts(TEXT))
    assert loss < 5.5
    times = round_times(target, draft, vocabulary=256, most=2, text=list(TEXT[:300]))
    asked = [list(TEXT[i : i + 48]) for i in range(3)]
    times, accepted = calibrated(times, target, draft, asked, k=2, seed=0, count=20)
    assert sum(accepted.counts) > 10 and times.low <= 1 <= times.high
    told = {("3-gram", k): speculated(times, accepted, k) for k in (1, 2)}
    predicted = {
        arm: Ratio(value=1 / one.speedup, low=1 / one.speedup_high, high=1 / one.speedup_low)
        for arm, one in told.items()
    }
    turns = take_turns(target, {"3-gram": draft}, (1, 2), [list(TEXT[i : i + 48]) for i in range(6)], seed=0)
    trials = judged(turns, predicted, "parts")
    assert [each.k for each in trials] == [1, 2]
    for each in trials:
        assert 1 <= each.tau <= each.k + 1
        row = each.row()
        assert row.names == ("speculative-decoding",) and row.predicted == predicted["3-gram", each.k].value


def test_the_command_trains_records_predicts_and_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of it on small models."""
    target, wide, deep = (DecoderShape(layers=n, width=w) for n, w in ((3, 64), (1, 32), (2, 16)))

    def recorded(predictor: Predictor, prompt: Sequence[int], folder: Path) -> Path:
        """As the protocol does; a draft is quicker than this target however busy the machine is."""
        feed = predictor.feed

        def late(tokens: Sequence[int]) -> Tensor:
            sleep(0.05)
            return feed(tokens)

        with monkeypatch.context() as patch:
            if folder.name == str(target):
                patch.setattr(predictor, "feed", late)
            return record_decoding(predictor, prompt, folder)

    monkeypatch.setattr(measuring, "_REPEATS", 6)
    monkeypatch.setattr(measuring, "_TURNS", 3)
    for name, value in {
        "record_decoding": recorded, "TARGET": target, "WIDE": wide, "DEEP": deep,
        "STEPS": {target: 2, wide: 2, deep: 2}, "_CALIBRATION": 2, "KS": (1, 2),
    }.items():  # fmt: skip
        monkeypatch.setattr(protocol, name, value)
    assert protocol.main(["--prompts", "3", "--seeds", "1"]) == 0
    page = capsys.readouterr().out
    assert page.count("| 4-gram | 2 |") == 2 and page.count("the range holds") == 2
    assert "## Speed-ups from recordings" in page and "1x32 for 3x64, bytes | 0.0" in page


def test_wide_drafts_win_on_the_studys_sizes() -> None:
    rows = [line for line in study_table().splitlines() if line.startswith("| kernels")]
    gains = [float(line.split("|")[-2].strip().rstrip("%")) for line in rows]
    assert len(gains) == 3 and min(gains) > 10
