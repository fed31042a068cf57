"""Times of the parts of rounds, acceptance on text of its own, and decoding of prompts with every draft in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import thread_time

import numpy as np
import torch
from torch import Tensor

import foretrace as ft
from foretrace.serving.speculative.rounds import RoundTimes
from foretrace.techniques.compute.acceptance import Acceptance
from reproductions.speculative.decoder import Predictor
from reproductions.speculative.decoding import Dice, decode, decode_speculatively

PROMPT, COUNT = 48, 80  # bytes
_REPEATS = 60
_TURNS = 12  # of the loops around nothing
_IN_A_ROW = 6  # tokens of plain decoding; the first finds caches of the processor as another model left them
DraftArm = tuple[str, int]  # a draft and its k


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRounds(RoundTimes):
    """Parts of a round that were measured, with the host's work as terms of its own; its range is the draft's."""

    round_s: float = 0.0  # once per round
    proposal_s: float = 0.0  # per proposal: drawing it, and accepting it or not
    token_s: float = 0.0  # per token without a draft

    @property
    def plain_s(self) -> float:
        """Seconds per token of a sequence without a draft."""
        return self.verify_s[0] + self.token_s

    def round_seconds(self, k: int, accepted: Acceptance, end: int = 0) -> float:
        """Return seconds of a round; `end` as of `RoundTimes`."""
        host_s = (self.low, 1.0, self.high)[end + 1] * (self.round_s + k * self.proposal_s)
        return RoundTimes.round_seconds(self, k, accepted, end) + host_s


def prompts(text: bytes, count: int, *, seed: int) -> list[list[int]]:
    """Pieces of a text, drawn."""
    begins = np.random.default_rng(seed).integers(0, len(text) - PROMPT, count)
    return [list(text[at : at + PROMPT]) for at in begins.tolist()]


class Instant:
    """A predictor that takes no time: what is left of a loop around it is the host's."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.vocabulary, self.length = rows, rows.shape[-1], 0

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """The same probabilities for all."""
        self.length += len(tokens)
        return self.rows[: len(tokens)]

    def keep(self, length: int) -> None:
        """Forget what follows."""
        self.length = min(self.length, length)


def host_seconds(vocabulary: int, most: int) -> tuple[float, float, float]:
    """Of the loops' own work: per token without a draft, per round, per proposal."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.softmax(2 * torch.randn(1, vocabulary, generator=generator), -1).expand(most + 1, -1)
    near = torch.softmax(rows.log() + 0.7 * torch.randn(1, vocabulary, generator=generator), -1)
    target, draft, dice = Instant(rows), Instant(near), Dice(0)
    ks = sorted({1, most, *(k for k in (2, 4) if k < most)})
    plain, rounds = list[float](), {k: list[float]() for k in ks}
    for turn in range(_TURNS):
        run = decode(target, [0], 200, dice)
        plain += [run.seconds / len(run.tokens)] * bool(turn)
        for k in ks:
            run = decode_speculatively(target, draft, [0], 200, k, dice)
            rounds[k] += [run.seconds / len(run.accepted)] * bool(turn)
    slope, level = np.polyfit(ks, [median(rounds[k]) for k in ks], 1)
    return median(plain), max(float(level), 0.0), max(float(slope), 0.0)


def round_times(
    target: Predictor, draft: Predictor, *, vocabulary: int, most: int, text: Sequence[int]
) -> HostedRounds:  # fmt: skip
    """Time passes of both models in the order of a round, at contexts spread over those of decoding; medians."""
    contexts = np.linspace(PROMPT, PROMPT + COUNT, _REPEATS).astype(int).tolist()
    plain, once, twice = list[float](), list[float](), list[float]()
    verify: dict[int, list[float]] = {m: [] for m in range(2, most + 2)}
    for context in contexts:
        for each in (target, draft):
            each.keep(0)
            each.feed(text[:context])
        plain += [_seconds(target, text[i : i + 1]) for i in range(_IN_A_ROW)][1:]
        for m, taken in verify.items():
            target.keep(context)
            draft.keep(context)
            # The first pass behind the target's finds the caches of the processor taken by it.
            twice.append(_seconds(draft, text[:2]))
            draft.keep(context)
            once += [_seconds(draft, text[:1]) for _ in range(3)]
            taken.append(_seconds(target, text[:m]))
            draft.keep(context)
            once.append(_seconds(draft, text[:1]))
    token_s, round_s, proposal_s = host_seconds(vocabulary, most)
    return HostedRounds(
        verify_s=(median(plain), *(median(each) for each in verify.values())), draft_s=median(once),
        catch_up_s=max(median(twice) - median(once), 0.0), round_s=round_s, proposal_s=proposal_s, token_s=token_s,
    )  # fmt: skip


def _seconds(predictor: Predictor, tokens: Sequence[int]) -> float:
    began = thread_time()
    predictor.feed(tokens)
    return thread_time() - began


def calibrated(
    times: HostedRounds, target: Predictor, draft: Predictor, asked: Sequence[Sequence[int]], *, k: int, seed: int,
    count: int = COUNT,
) -> tuple[HostedRounds, Acceptance]:  # fmt: skip
    """Rounds of k proposals by how many were accepted; and what rounds of 1 and of k took beyond their parts.

    What is left is the host's and the processor's caches, which the other model has taken: so much per round and so
    much per proposal. The range is how much the prompts differ in it.
    """
    counts, dice = [0] * (k + 1), Dice(seed)
    plain, left = list[float](), {1: list[float](), k: list[float]()}
    runs = {1: list[tuple[float, int]](), k: list[tuple[float, int]]()}
    full = {1: 0, k: 0}
    for prompt in asked:
        alone = decode(target, prompt, count, dice)
        plain.append(alone.seconds / len(alone.tokens))
        for proposals, each in runs.items():
            run = decode_speculatively(target, draft, prompt, count, proposals, dice)
            each.append((run.seconds, len(run.accepted)))
            full[proposals] += run.accepted.count(proposals)
            if proposals == k:
                for kept in run.accepted:
                    counts[kept] += 1
    known = replace(times, round_s=0.0, proposal_s=0.0, token_s=max(median(plain) - times.verify_s[0], 0.0))
    for proposals, each in runs.items():
        rounds = sum(n for _, n in each)
        parts = proposals * known.draft_s + full[proposals] / rounds * known.catch_up_s + known.verify_s[proposals]
        left[proposals] = [seconds / n - parts for seconds, n in each]
    proposal_s = max((median(left[k]) - median(left[1])) / (k - 1), times.proposal_s)
    # The range stretches what a round takes beyond a pass of the target, so that is what prompts must differ in.
    beyond = [max(seconds / n - known.verify_s[0], 0.0) for seconds, n in runs[k]]
    low, high = (float(np.quantile(beyond, q)) / max(median(beyond), 1e-9) for q in (0.1, 0.9))
    found = replace(
        known, proposal_s=proposal_s, round_s=max(median(left[1]) - proposal_s, 0.0), low=min(low, 1.0),
        high=max(high, 1.0), verify_low=min(low, 1.0), verify_high=max(high, 1.0),
    )  # fmt: skip
    return found, Acceptance.of("/".join(map(str, counts)))


def widened(times: Mapping[str, HostedRounds]) -> dict[str, HostedRounds]:
    """With the drift of the machine: how much plain decoding differed from one draft's calibration to the other's."""
    pace = [each.plain_s for each in times.values()]
    found = {}
    for name, each in times.items():
        quick, slow = min(pace) / each.plain_s, max(pace) / each.plain_s
        found[name] = replace(
            each, low=each.low * quick, verify_low=each.verify_low * quick, high=each.high * slow,
            verify_high=each.verify_high * slow,
        )  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Seconds per token of every prompt (rows of the prompts of all seeds), by arm; tokens per round."""

    plain_s: tuple[float, ...]
    again_s: tuple[float, ...]
    arms_s: Mapping[DraftArm, tuple[float, ...]]
    tau: Mapping[DraftArm, float]


def take_turns(
    target: Predictor, drafts: Mapping[str, Predictor], ks: Sequence[int], asked: Sequence[Sequence[int]], *,
    seed: int, tell: Callable[[float], None] | None = None,
) -> Turns:  # fmt: skip
    """Decode every prompt plainly, with every draft and k, and plainly again, one after the other."""
    plain, again = list[float](), list[float]()
    arms: dict[DraftArm, list[float]] = {(name, k): [] for name in drafts for k in ks}
    emitted = {arm: [0, 0] for arm in arms}
    order = np.random.default_rng(seed)
    for i, prompt in enumerate(asked):
        dice = Dice(seed * 1000 + i)

        def plainly(prompt: Sequence[int] = prompt, dice: Dice = dice) -> float:
            run = decode(target, prompt, COUNT, dice)
            return run.seconds / len(run.tokens)

        plain.append(plainly())
        turn = list(arms)
        order.shuffle(turn)
        for name, k in turn:
            run = decode_speculatively(target, drafts[name], prompt, COUNT, k, dice)
            arms[name, k].append(run.seconds / len(run.tokens))
            emitted[name, k][0] += len(run.tokens)
            emitted[name, k][1] += len(run.accepted)
        again.append(plainly())
        if tell is not None:
            tell((i + 1) / len(asked))
    return Turns(
        plain_s=tuple(plain), again_s=tuple(again), arms_s={arm: tuple(each) for arm, each in arms.items()},
        tau={arm: tokens / rounds for arm, (tokens, rounds) in emitted.items()},
    )  # fmt: skip


def record_decoding(predictor: Predictor, prompt: Sequence[int], folder: Path) -> Path:
    """Record plain decoding behind a prompt, a token per step, as a user would."""
    dice, token = Dice(0), prompt[-1]
    predictor.keep(0)
    predictor.feed(prompt[:-1])
    with ft.record(folder, active=12, memory=False) as recorder:
        while not recorder.over:
            token = dice.draw(predictor.feed([token])[-1])
            recorder.step()
    assert recorder.path is not None
    return recorder.path
