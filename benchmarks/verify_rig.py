"""Verify predictions for several workers on real processes and shaped links, and keep every row: data/ledger.jsonl.

    python benchmarks/verify_rig.py [--only PART ...] [--again] [--list]

Sessions of the plan that follow each other on one link share a rig, whose link is calibrated once, unless layers sleep
in one and compute in the other: messages beside computing take longer. In each, one worker is recorded alone, all arms
are predicted and then run interleaved. Rows are added after each session, so that an interruption (Ctrl-C, a kill)
loses one session at most; conclusive rows that are there are kept unless `--again`. PART keeps the plan to sessions
whose name contains it. Sessions "found" run what `foretrace optimise` answers for the recording of one worker and the
link as it was measured, against DistributedDataParallel as it is by default. It needs root (`foretrace rig check`),
takes half an hour in all, and nothing else should use the cores meanwhile.
`python benchmarks/accuracy.py ledger` writes the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Ledger, Row, write
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import is_emulated
from foretrace.experiment.links.job import LinkJob, LinkOutcome
from foretrace.experiment.links.judge import rows_of, setting
from foretrace.experiment.links.measure import Find, completed, rig_for, verify
from foretrace.experiment.processes import WorkerError
from foretrace.experiment.statistics import Verdict
from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.optimise import Optimiser
from foretrace.plan.result import OptimiseRequest
from foretrace.techniques.arguments import parse_all

DATA = Path(__file__).parent / "data"
ROWS = DATA / "ledger.jsonl"

CAPS = tuple((f"data-parallel bucket_mb={cap}",) for cap in ("0.5", "1", "2", "4", "8", "25"))
LARGE_CAPS = CAPS[3:]  # smaller buckets among more than two workers wait for the scheduler of two cores
PLAIN = ("data-parallel bucket_mb=4",)


def compressed(method: str) -> tuple[str, ...]:
    """Data-parallel with a communication hook."""
    return (*PLAIN, f"gradient-compression method={method}")


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rig of the plan."""

    name: str
    job: LinkJob
    find: Find | None = None  # further arms, once one worker is recorded

    @property
    def arms(self) -> int:
        """How many are to be run."""
        return len(self.job.arms) + (self.find is not None)


def session(name: str, work: str, link: str, arms: Sequence[tuple[str, ...]], *, workers: int = 2) -> Session:
    """A session with as few rounds as a verdict needs."""
    job = LinkJob(work=work, link=link, workers=workers, arms=tuple(arms), seconds=20.0)
    return Session(name=f"{name} {work} {link} x{workers}", job=job)


def best_buckets(graph: TaskGraph, table: Path) -> list[tuple[str, ...]]:
    """The buckets that `foretrace optimise --only-buckets` finds for two workers on the measured link."""
    wanted = OptimiseRequest(workers=2, network=str(table), only_buckets=True, ahead=False)
    answer = Optimiser(recorded=graph, wanted=wanted).run(30.0)
    assert answer.best.parallel is not None
    print(f"  optimise: {1e3 * answer.default_s:.1f} -> {1e3 * answer.step_s:.1f} ms", flush=True)
    return [(f"data-parallel buckets_mb={answer.best.parallel.buckets_mb} views=yes",)]


def found(work: str, link: str) -> Session:
    """A session of what the search finds, against the default."""
    job = LinkJob(work=work, link=link, workers=2, arms=(), against=("data-parallel",), seconds=30.0)
    return Session(name=f"found {work} {link} x2", job=job, find=best_buckets)


OTHERS = (
    ("fully-sharded blocks=EmulatedLayer",),
    ("local-steps every=2",),  # any two steps hold one average
    ("local-steps updates=dgc every=1",),
    ("local-steps updates=gaia every=1",),
    (*PLAIN, "bucket-fusion cap_mb=0"),
)
SPARSE = OTHERS[2:4]
HOOKS = (PLAIN, compressed("fp16"), compressed("powersgd"))
HELD_OUT = (
    (("gpt2", "mobilenet-v2", "lstm-lm"), ("500mbit", "150mbit", "1gbit")),
    (("llama", "inception-v3", "seq2seq"), ("250mbit", "700mbit")),
)
UNSEEN = ("transformer", "dropout-lstm", "deepspeech2")
PLAN: tuple[Session, ...] = (
    *(session("caps", "24x0.5mb/10ms", link, CAPS) for link in ("1gbit", "300mbit", "100mbit")),
    session("default-buckets", "12x1mb/20ms", "300mbit", [("data-parallel",)]),
    *(session("hooks", "12x1mb/20ms", link, HOOKS) for link in ("200mbit", "500mbit")),
    *(session("partial-backprop", "12x1mb/20ms/5ms", link, [("partial-backprop",)]) for link in ("300mbit", "1gbit")),
    session("more-workers", "12x1mb/20ms", "300mbit", LARGE_CAPS, workers=4),
    *(session("real-compute", model, "300mbit", [("data-parallel",)]) for model in ("resnet50", "bert", "vgg11")),
    # No figure of the predictions comes from these, but what they missed led to changes.
    *(
        session("held-out", model, link, [("data-parallel",)])
        for models, links in HELD_OUT
        for link in links
        for model in models
    ),
    # Run once, when all of the prediction stood.
    *(session("unseen", model, link, [("data-parallel",)]) for link in ("400mbit", "850mbit") for model in UNSEEN),
    *(session("techniques", work, "300mbit", OTHERS) for work in ("12x1mb/20ms/5ms", "24x0.5mb/10ms/3ms")),
    # Models and links that no constant of coding was seen with.
    session("coding", "8x2mb/15ms/5ms", "200mbit", SPARSE),
    session("coding", "lstm-lm", "500mbit", SPARSE),
    *(
        session("levels", work, "300mbit", [PLAIN, (*PLAIN, "hierarchical-allreduce levels=2x2")], workers=4)
        for work in ("12x1mb/20ms", "24x0.5mb/10ms")
    ),
    session("partial-backprop", "12x1mb/20ms/5ms/2ms", "300mbit", [("partial-backprop",)], workers=4),
    *(found(work, link) for link in ("300mbit", "500mbit") for work in ("24x0.5mb/10ms", "resnet50", "gpt2")),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="sessions whose name contains a part")
    parser.add_argument("--again", action="store_true", help="run what has conclusive rows, too")
    parser.add_argument(
        "--list", action="store_true", help="name the rigs of the plan and what is left of them, and stop"
    )
    chosen = parser.parse_args(arguments)
    plan = [each for each in PLAN if not chosen.only or any(part in each.name for part in chosen.only)]
    if not plan:
        parser.error(f"no session contains {' or '.join(chosen.only)}; see --list.")
    ledger = Ledger(DATA / "ledger.sqlite")
    if ROWS.exists():
        ledger.import_jsonl(ROWS)
    rows = ledger.rows() if ledger.path.is_file() else ()
    todo = [each if chosen.again else left(each, rows) for each in plan]
    if chosen.list:
        for each in todo:
            print(f"{each.name}: {each.arms} arms left")
        return 0
    netns.require()
    failed = 0
    todo = [each for each in todo if each.arms]
    for _, some in groupby(todo, key=lambda each: (each.job.link, each.job.workers, is_emulated(each.job.work))):
        group = list(some)
        try:
            with rig_for([each.job for each in group]) as rig:
                for each in group:
                    began = time.monotonic()
                    print(f"{1 + todo.index(each)}/{len(todo)} {each.name}", flush=True)
                    outcome = verify(each.job, on=rig, find=each.find)
                    ledger.add(rows_of(outcome))
                    write(ledger.rows(), ROWS)
                    print(summary(outcome), f"  {time.monotonic() - began:.0f} s", sep="\n", flush=True)
        except (ForetraceError, WorkerError) as error:
            failed += 1
            print(f"  failed, with what was left on its link: {error}", flush=True)
    return int(failed > 0)


def left(session: Session, rows: Sequence[Row]) -> Session:
    """The session without the arms that have a conclusive row."""
    job = session.job
    concluded = [
        row
        for row in rows
        if row.model == job.work and row.size == setting(job) and row.verdict != Verdict.INCONCLUSIVE
        and tuple(row.arms.get("rig", {}).get("against", ())) == job.against
    ]  # fmt: skip
    done = {row.techniques for row in concluded}
    arms = [arm for arm in job.arms if written(arm, job) not in done]
    return replace(session, job=replace_arms(job, arms), find=None if concluded else session.find)


def written(arm: Sequence[str], job: LinkJob) -> str:
    """Techniques as a row has them; as they stand where this foretrace does not know one."""
    try:
        return " + ".join(str(each) for each in parse_all(completed(arm, job.workers, job.link)))
    except ForetraceError:
        return " + ".join(arm)


def replace_arms(job: LinkJob, arms: Sequence[tuple[str, ...]]) -> LinkJob:
    from msgspec.structs import replace as with_fields

    return with_fields(job, arms=tuple(arms))


def summary(outcome: LinkOutcome) -> str:
    """A line per arm."""
    lines = [
        f"  link {outcome.link.mbit_s:.1f} Mbit/s within {100 * outcome.link.spread:.1f} %, alone "
        f"{1e3 * outcome.before.median_s:.1f} ms (recorded {1e3 * outcome.recorded_s:.1f})"
    ]
    lines += [
        f"  {' + '.join(arm.techniques)}: predicted {1e3 * arm.predicted_s:.1f}, measured "
        f"{1e3 * arm.trial.after.median_s:.1f} ms, {100 * arm.step_error:+.2f} % (over the baseline "
        f"{100 * arm.trial.error:+.2f} %), {arm.trial.verdict}"
        for arm in outcome.arms
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
