"""Train a target and its drafts, calibrate, predict speed-ups in two ways, decode in turns, and keep the rows.

make reproduce NAME=speculative [ARGS="--write"]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from foretrace.experiment.ledger import Row, export_lines
from foretrace.experiment.statistics import Arm, Ratio
from foretrace.experiment.trial import TriedPrediction, changed
from foretrace.files import write_text
from foretrace.flow import read
from foretrace.serving.speculative.rounds import best, break_even_draft_s, speculated
from foretrace.techniques.compute.acceptance import Acceptance
from foretrace.techniques.compute.speculative_decoding import SpeculativeDecoding
from reproductions import parser_of
from reproductions.speculative.decoder import BYTES, Cached, Counts, DecoderShape, Ngram, Predictor
from reproductions.speculative.measuring import (
    DraftArm,
    Turns,
    calibrated,
    prompts,
    record_decoding,
    round_times,
    take_turns,
    widened,
)
from reproductions.speculative.study import rates_table, study_table
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
    source: str  # of the prediction
    tau: float  # measured
    trial: TriedPrediction  # time per token over that without a draft

    @property
    def error(self) -> float:
        """Of the predicted time per token: below 0 where decoding was slower than predicted."""
        return self.trial.error

    def row(self) -> Row:
        """A row of the ledger."""
        return self.trial.row(
            f"speculative-decoding draft={self.draft} k={self.k}", model=f"decoder of bytes {TARGET}",
            size=f"{STEPS[TARGET]} steps", arms={"tau": self.tau},
            parameters={"draft": self.draft, "k": self.k, "source": self.source},
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


def from_recordings(
    recorded: Mapping[str, Path], accepted: Mapping[str, Acceptance], target: str
) -> dict[DraftArm, Ratio]:
    """What `whatif` tells of every draft and k, by recordings of decoding with each model alone."""
    run = read(recorded[target]).graph()
    found = {}
    for draft, k in ((name, k) for name in accepted for k in KS):
        counts = "/".join(map(str, accepted[draft].counts))
        told = run.apply(SpeculativeDecoding(draft=str(recorded[draft]), k=k, acceptance=counts)).whatif()
        low, high = told.ratio_interval
        found[draft, k] = Ratio(value=told.after_s / told.before_s, low=low, high=high)
    return found


def judged(turns: Turns, predicted: Mapping[DraftArm, Ratio], source: str) -> list[DraftTrial]:
    """Every draft and k against decoding without one; ratios of time per token."""

    def blocks(times: Sequence[float]) -> list[float]:
        return np.asarray(times)[: len(times) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).mean(1).tolist()  # type: ignore[no-any-return]

    plain, again = (Arm.of(blocks(times)) for times in (turns.plain_s, turns.again_s))
    return [
        DraftTrial(
            draft=draft, k=k, source=source, tau=turns.tau[draft, k],
            trial=changed(predicted[draft, k], plain, again, Arm.of(blocks(times)), clock="cpu"),
        )
        for (draft, k), times in turns.arms_s.items()
    ]  # fmt: skip


PARTS, RECORDINGS = "parts", "recordings"
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
FROM_RECORDINGS = """The same runs as `foretrace whatif` predicts them: plain decoding of each model was recorded, and
`speculative-decoding` was given the draft's recording, k and the rounds counted above. What verifying several tokens
takes, and the host's work of a round, are its assumptions; no round was timed.
"""


def trial_table(trials: Sequence[DraftTrial], tau: Mapping[DraftArm, float]) -> str:
    """A row per draft and k, and what they come to."""
    rows = [
        (each.draft, str(each.k), f"{tau[each.draft, each.k]:.2f}", f"{each.tau:.2f}",
         *_speedups(each.trial.predicted), *_speedups(each.trial.measured), f"{percent(each.error, signed=True)} %",
         each.trial.verdict)
        for each in trials
    ]  # fmt: skip
    header = ("draft", "k", "τ predicted", "τ measured", "speed-up predicted", "80 % range", "measured", "80 % range",
              "error", "verdict")  # fmt: skip
    off, held = median(abs(each.error) for each in trials), sum(each.trial.covered for each in trials)
    return f"{table(header, rows)}\n\nMedian error {percent(off)} %; the range holds {held} of {len(trials)}.\n\n"


def _speedups(of: Ratio) -> tuple[str, str]:
    """The speed-up of a ratio of times, and its range."""
    return f"{1 / of.value:.2f}", f"{1 / of.high:.2f} – {1 / of.low:.2f}"


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
    parser.add_argument(
        "--tables", action="store_true", help="renew what README.md says of models that do not run here"
    )
    given = parser.parse_args(arguments)
    if given.tables:
        ran, title, _ = (HERE / "README.md").read_text(encoding="utf-8").partition("## The study's two drafts")
        assert title
        write_text(HERE / "README.md", f"{ran}{study_table()}\n{rates_table(())}")
        return 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trials, page = _run(given)
    finally:
        torch.set_num_threads(threads)
    if given.write:
        write_text(HERE / "rows.jsonl", export_lines(each.row() for each in trials))
        put(HERE / "README.md", page)
    else:
        print(page, end="")
    return 0


def _run(given: argparse.Namespace) -> tuple[list[DraftTrial], str]:
    """The trials, and the page about them."""
    text, begin, end = standard_library(), given.first_seed, given.first_seed + given.seeds
    if given.models is not None and given.models.exists():
        found, rows = torch.load(given.models, weights_only=False)
    else:
        found, rows = models(text, given.steps)
        if given.models is not None:
            torch.save((found, rows), given.models)
    target, drafts = found[str(TARGET)], {name: each for name, each in found.items() if name != str(TARGET)}
    half = len(text.held_out) // 2
    first, second = text.held_out[:half], text.held_out[half:]
    times, accepted = {}, {}
    for name, each in drafts.items():
        alone = round_times(target, each, vocabulary=BYTES, most=MOST, text=list(first[:400]))
        times[name], accepted[name] = calibrated(
            alone, target, each, prompts(first, _CALIBRATION, seed=end), k=MOST, seed=end
        )
    times = widened(times)
    arms = [(name, k) for name in drafts for k in KS]
    told = {(name, k): speculated(times[name], accepted[name], k) for name, k in arms}
    by_parts = {
        arm: Ratio(value=1 / one.speedup, low=1 / one.speedup_high, high=1 / one.speedup_low)
        for arm, one in told.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        recorded = {
            name: record_decoding(each, prompts(first, 1, seed=end)[0], Path(folder) / name)
            for name, each in found.items()
        }
        by_recordings = from_recordings(recorded, accepted, str(TARGET))
    turns = [
        take_turns(target, drafts, KS, prompts(second, given.prompts, seed=seed), seed=seed,
                   tell=lambda done: print(f"\r  {100 * done:3.0f} %", end="", file=sys.stderr, flush=True))
        for seed in range(begin, end)
    ]  # fmt: skip
    joined = Turns(
        plain_s=tuple(t for each in turns for t in each.plain_s),
        again_s=tuple(t for each in turns for t in each.again_s),
        arms_s={arm: tuple(t for each in turns for t in each.arms_s[arm]) for arm in arms},
        tau={arm: 1 / float(np.mean([1 / each.tau[arm] for each in turns])) for arm in arms},
    )
    parts, recordings = judged(joined, by_parts, PARTS), judged(joined, by_recordings, RECORDINGS)
    notes = []
    for name in drafts:
        one, chosen = times[name], best(times[name], accepted[name])
        need = break_even_draft_s(one, accepted[name], chosen.k)
        notes.append(
            f"{name}: a pass takes {1e3 * one.draft_s:.3g} ms; best k {chosen.k}, {chosen.speedup:.2f} times as fast; "
            f"at that k a draft must be faster than {1e3 * need:.3g} ms. Of {MOST} proposals, rounds accepted "
            f"{'/'.join(map(str, accepted[name].counts))}."
        )
    one = times[str(WIDE)]
    notes.append(
        f"The target takes {1e3 * one.verify_s[0]:.3g} ms over one token, "
        f"{', '.join(f'{1e3 * one.verify_s[k]:.3g} over {k + 1}' for k in (1, 2, 4, 8))}; the host "
        f"{1e6 * one.token_s:.3g} µs per token without a draft, {1e6 * one.round_s:.3g} µs per round and "
        f"{1e6 * one.proposal_s:.3g} µs per proposal."
    )
    how = (
        f"{given.prompts} prompts of each of the seeds {begin} – {end - 1}; a plain token took "
        f"{1e3 * parts[0].trial.before_s:.3g} ms (median); load averages {load()}. A range is how much prompts, and "
        "the calibrations of the drafts, differ in what a round takes beyond a pass of the target."
    )
    tau = {arm: each.tau for arm, each in told.items()}
    own = [
        (f"{name} for {TARGET}, bytes", sum(map(torch.numel, each.model.parameters())), accepted[name].survival(1))
        for name, each in drafts.items() if isinstance(each, Cached)
    ]  # fmt: skip
    head = HEAD.format(date=today(), machine=machine(), calibration=_CALIBRATION, block=_BLOCK)
    page = (
        f"{head}{how}\n\n{table(('model', 'parameters', 'training'), rows)}\n\n## Speed-ups\n\n"
        f"{trial_table(parts, tau)}" + "\n".join(f"- {each}" for each in notes)
        + f"\n\n## Speed-ups from recordings\n\n{FROM_RECORDINGS}\n"
        f"{trial_table(recordings, tau)}{study_table()}\n{rates_table(own)}"
    )  # fmt: skip
    return [*parts, *recordings], page
