"""Train a target and its drafts, calibrate, predict speed-ups, decode in turns, and keep the rows.

make reproduce NAME=speculative [ARGS="--write"]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from foretrace.experiment.ledger import Row, export_lines
from foretrace.experiment.statistics import Arm, Ratio
from foretrace.experiment.trial import TriedPrediction, changed
from foretrace.files import write_text
from foretrace.serving.speculative.rounds import Speculated, best, break_even_draft_s, speculated
from reproductions import parser_of
from reproductions.speculative.decoder import BYTES, Cached, Counts, DecoderShape, Ngram, Predictor
from reproductions.speculative.measuring import Turns, calibrated, prompts, round_times, take_turns, widened
from reproductions.speculative.study import study_table
from reproductions.speculative.training import Text, standard_library, trained
from reproductions.systems import put
from tables import load, machine, percent, table, today

HERE = Path(__file__).parent
TARGET, WIDE, DEEP = (
    DecoderShape(layers=8, width=192),
    DecoderShape(layers=1, width=256),
    DecoderShape(layers=6, width=48),
)
STEPS = {TARGET: 320, WIDE: 300, DEEP: 400}
ORDER = 4  # of the n-gram
KS, MOST = (1, 2, 4), 8
_BLOCK = 3  # prompts whose time is one sample


@dataclass(frozen=True, kw_only=True)
class DraftTrial:
    """A draft and its k: what was predicted and what came of it."""

    draft: str
    k: int
    tau: float  # measured
    predicted: Speculated
    trial: TriedPrediction  # time per token over that without a draft

    @property
    def error(self) -> float:
        """Of the predicted speed-up: below 0 where decoding was slower than predicted."""
        return self.trial.error

    def row(self) -> Row:
        """A row of the ledger."""
        return self.trial.row(
            f"speculative-decoding draft={self.draft} k={self.k}", model=f"decoder of bytes {TARGET}",
            size=f"{STEPS[TARGET]} steps", parameters={"draft": self.draft, "k": self.k}, arms={"tau": self.tau},
            notes=("Seconds per token that came out; reading the prompt is left out.",),
        )  # fmt: skip


def models(text: Text, shares: float = 1.0) -> tuple[dict[str, Predictor], list[tuple[str, str, str]]]:
    """The target (first) and the drafts, trained by so large a share of the stated steps; their losses as rows."""
    found: dict[str, Predictor] = {}
    rows = []
    for shape, steps in STEPS.items():
        model, loss = trained(shape, text.training, max(int(shares * steps), 1))
        found[str(shape)] = Cached(model)
        parameters = sum(each.numel() for each in model.parameters())
        rows.append((str(shape), f"{parameters:,}", f"{max(int(shares * steps), 1)} steps: {loss:.2f} nats per byte"))
    found[f"{ORDER}-gram"] = Ngram(Counts(text.training, order=ORDER))
    rows.append((f"{ORDER}-gram", "counts", "one pass over the text"))
    return found, rows


def judged(turns: Turns, predicted: dict[tuple[str, int], Speculated]) -> list[DraftTrial]:
    """Every draft and k against decoding without one."""

    def blocks(times: Sequence[float]) -> list[float]:
        return np.asarray(times)[: len(times) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).mean(1).tolist()  # type: ignore[no-any-return]

    plain, again = (Arm.of(blocks(times)) for times in (turns.plain_s, turns.again_s))
    found = []
    for (draft, k), times in turns.arms_s.items():
        one = predicted[draft, k]
        foretold = Ratio(value=1 / one.speedup, low=1 / one.speedup_high, high=1 / one.speedup_low)
        trial = changed(foretold, plain, again, Arm.of(blocks(times)), clock="cpu")
        found.append(DraftTrial(draft=draft, k=k, tau=turns.tau[draft, k], predicted=one, trial=trial))
    return found


HEAD = """# Speculative decoding, predicted and run

Decoders of bytes are trained by stated steps on modules of this Python's standard library (PSF licence; every eighth
file held out), one thread. Passes of both models are timed alone, the loops' own work on predictors that take no time;
acceptance, and what rounds of 1 and of 8 proposals take beyond these parts, on {calibration} prompts of the first half
of the held-out text. Then every draft and k is predicted, and
prompts of the second half are decoded by sampling: plainly, with every draft and k in random order, and plainly again.
A sample is the mean of {block} prompts; the ratio is the median over samples. Written by
`make reproduce NAME=speculative ARGS=--write`.

*{date}, {machine}.*

"""


def page(trials: Sequence[DraftTrial], trained_rows: Sequence[tuple[str, ...]], how: str, notes: Sequence[str]) -> str:
    """The page."""
    rows = [
        (each.draft, str(each.k), f"{each.predicted.tau:.2f}", f"{each.tau:.2f}", f"{each.predicted.speedup:.2f}",
         f"{each.predicted.speedup_low:.2f} – {each.predicted.speedup_high:.2f}",
         f"{1 / each.trial.measured.value:.2f}",
         f"{1 / each.trial.measured.high:.2f} – {1 / each.trial.measured.low:.2f}",
         f"{percent(each.error, signed=True)} %", each.trial.verdict)
        for each in trials
    ]  # fmt: skip
    off = median(abs(each.error) for each in trials)
    header = ("draft", "k", "τ predicted", "τ measured", "speed-up predicted", "80 % range", "measured", "80 % range",
              "error", "verdict")  # fmt: skip
    text = HEAD.format(
        date=today(),
        machine=machine(),
        calibration=_CALIBRATION,
        block=_BLOCK,
    )
    text += f"{how}\n\n{table(('model', 'parameters', 'training'), trained_rows)}\n\n## Speed-ups\n\n"
    held = sum(each.trial.covered for each in trials)
    text += (
        f"{table(header, rows)}\n\nMedian error {percent(off)} %; the range holds {held} of {len(trials)}.\n\n"
        + "\n".join(f"- {each}" for each in notes)
    )
    return f"{text}\n\n{study_table()}"


_CALIBRATION = 36


def main(arguments: Sequence[str]) -> int:
    """Train, predict, run; print the page, or write it and rows.jsonl beside this file."""
    parser = parser_of("speculative", __doc__)
    parser.add_argument("--prompts", type=int, default=24, help="of every seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="of the prompts that judge")
    parser.add_argument("--steps", type=float, default=1.0, help="share of the stated steps")
    parser.add_argument("--models", type=Path, help="keep trained models in this file, or take them from it")
    parser.add_argument("--write", action="store_true", help="write README.md and rows.jsonl beside this file")
    given = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(given)
    finally:
        torch.set_num_threads(threads)


def _run(given: object) -> int:
    asked, seeds, share, kept, write, begin = (
        getattr(given, each) for each in ("prompts", "seeds", "steps", "models", "write", "first_seed")
    )
    text = standard_library()
    if kept is not None and kept.exists():
        found, rows = torch.load(kept, weights_only=False)
    else:
        found, rows = models(text, share)
        if kept is not None:
            torch.save((found, rows), kept)
    target, drafts = found[str(TARGET)], {name: each for name, each in found.items() if name != str(TARGET)}
    half = len(text.held_out) // 2
    first, second = text.held_out[:half], text.held_out[half:]
    times = {
        name: round_times(target, each, vocabulary=BYTES, most=MOST, text=list(first[:400]))
        for name, each in drafts.items()
    }
    accepted = {}
    for name, each in drafts.items():
        asked_first = prompts(first, _CALIBRATION, seed=begin + seeds)
        times[name], accepted[name] = calibrated(times[name], target, each, asked_first, k=MOST, seed=begin + seeds)
    times = widened(times)
    predicted = {(name, k): speculated(times[name], accepted[name], k) for name in drafts for k in KS}
    turns = [
        take_turns(target, drafts, KS, prompts(second, asked, seed=seed), seed=seed,
                   tell=lambda done: print(f"\r  {100 * done:3.0f} %", end="", file=sys.stderr, flush=True))
        for seed in range(begin, begin + seeds)
    ]  # fmt: skip
    joined = Turns(
        plain_s=tuple(t for each in turns for t in each.plain_s),
        again_s=tuple(t for each in turns for t in each.again_s),
        arms_s={arm: tuple(t for each in turns for t in each.arms_s[arm]) for arm in predicted},
        tau={arm: 1 / float(np.mean([1 / each.tau[arm] for each in turns])) for arm in predicted},
    )
    trials = judged(joined, predicted)
    notes = []
    for name in drafts:
        one, chosen = times[name], best(times[name], accepted[name], MOST)
        need = break_even_draft_s(one, accepted[name], chosen.k)
        notes.append(
            f"{name}: a pass takes {1e3 * one.draft_s:.3g} ms; best k {chosen.k}, {chosen.speedup:.2f} times as fast; "
            f"at that k a draft must be faster than {1e3 * need:.3g} ms. Of {MOST} proposals, rounds accepted "
            f"{accepted[name].text}."
        )
    one = times[str(WIDE)]
    notes.append(
        f"The target takes {1e3 * one.verify_s[0]:.3g} ms over one token, "
        f"{', '.join(f'{1e3 * one.verify_s[k]:.3g} over {k + 1}' for k in (1, 2, 4, 8))}; the host "
        f"{1e6 * one.token_s:.3g} µs per token without a draft, {1e6 * one.round_s:.3g} µs per round and "
        f"{1e6 * one.proposal_s:.3g} µs per proposal."
    )
    plain_ms = 1e3 * trials[0].trial.before_s
    how = (
        f"{asked} prompts of each of the seeds {begin} – {begin + seeds - 1}; a plain token took {plain_ms:.3g} ms "
        f"(median); load averages {load()}. A range is how much prompts, and the calibrations of the drafts, differ in "
        "what a round takes beyond a pass of the target."
    )
    if write:
        write_text(HERE / "rows.jsonl", export_lines(each.row() for each in trials))
        put(HERE / "README.md", page(trials, rows, how, notes))
    else:
        print(page(trials, rows, how, notes), end="")
    return 0
