"""`foretrace fleet live` as an answer: when jobs of a real queue start, why one waits, what would start it sooner."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from foretrace.fleet.live.questions import ClusterChange, ForecastStart, QueueAnswer, Sooner
from foretrace.report.blocks import Block, Column, listing, table
from foretrace.report.units import count, long_time
from foretrace.report.views import Report, taken


class FleetLiveView(Report, frozen=True, kw_only=True):
    """`foretrace fleet live`: a queue of Slurm, played on from now."""

    command: str = "fleet live"
    source: str
    version: str
    nodes: int
    usable: int  # nodes that take jobs
    running: int
    waiting: int
    draws: int
    past: int  # jobs whose run times are known
    jobs: tuple[ForecastStart, ...]  # that wait, the next first
    asked: ForecastStart | None
    sooner: tuple[Sooner, ...]
    changes: tuple[ClusterChange, ...]

    def shown(self, top: int) -> Iterator[Block]:
        if self.asked is not None and self.asked.status == "waiting":
            yield f"Why: {self.asked.why}."
        yield listing(
            self.sooner, ("change", "would it start sooner?"), (_when, Column("starts in", right=True)),
            (_range, Column("80 % range", right=True)), (lambda each: "yes" if each.helps else "no", ""),
            ("command", Column("command", wide=True)), ("risk", Column("but", wide=True)),
        )  # fmt: skip
        rows = [
            (each.change, each.before_s, each.after_s, each.ratio, f"{each.low:.2f} – {each.high:.2f}")
            for each in self.changes
        ]
        before, after = Column("mean wait from now", "long"), Column("then", "long")
        yield table(["change", before, after, Column("ratio", "ratio"), Column("80 % range", right=True)], rows)
        slurm = Column("squeue --start", "long", unknown="no answer")
        yield listing(
            self.jobs, "job", "user", "partition", ("nodes", "nodes", "count"), ("gpus", "GPUs", "count"),
            (_when, Column("starts in", right=True)), (_range, Column("80 % range", right=True)),
            ("slurm_s", slurm), (lambda each: each.reason.split(",")[0][:24], "Slurm's reason"), top=top,
        )  # fmt: skip


def _when(each: ForecastStart | Sooner) -> str:
    return "unknown" if each.start_s is None else long_time(each.start_s)


def _range(each: ForecastStart | Sooner) -> str:
    if each.start_s is None or each.low_s is None:
        return "–"
    return f"{long_time(each.low_s)} – {'?' if each.high_s is None else long_time(each.high_s)}"


def live(found: QueueAnswer, *, next_: str = "") -> FleetLiveView:
    """Return the answer of a live queue."""
    seen = found.seen
    running, waiting = (sum(getattr(job, kind) for job in seen.jobs) for kind in ("running", "waiting"))
    notes = [*found.notes, *(f"job {job} has no start here: {why}" for job, why in sorted(found.left_out.items()))]
    if found.past:
        notes.append(f"run times are drawn from {count(found.past)} past jobs and from time limits")
    notes.append("jobs that are submitted later, reservations, preemption and limits of accounts are not played")
    return taken(
        FleetLiveView, found, headline=_headline(found, waiting), source=seen.source, version=seen.version,
        nodes=len(seen.nodes), usable=sum(node.usable for node in seen.nodes), running=running, waiting=waiting,
        jobs=found.starts, notes=tuple(notes), next=next_,
    )  # fmt: skip


def _headline(found: QueueAnswer, waiting: int) -> str:
    asked = found.asked
    if asked is None:
        first = next((each for each in found.starts if each.start_s is not None), None)
        if first is None:
            return f"{count(waiting)} jobs wait, and nothing says when one starts." if waiting else "No job waits."
        one = f"job {first.job} is the next to start, in {_when(first)} ({_range(first)})"
        return f"{count(waiting)} job{'s wait' if waiting > 1 else ' waits'}; {one}."
    if asked.status == "running":
        return f"Job {asked.job} runs, for {long_time(-(asked.start_s or 0.0))} by now."
    if asked.start_s is None:
        return f"Nothing says when job {asked.job} starts: {asked.why}."
    slurm = "gives no time" if asked.slurm_s is None else f"says {long_time(max(asked.slurm_s, 0.0))}"
    text = f"Job {asked.job} starts in {_when(asked)} ({_range(asked)}); squeue --start {slurm}."
    helps = [each for each in found.sooner if each.helps]
    best = max(helps, key=lambda each: each.sooner_s or 0.0, default=None)
    return text + (f" Sooner: {best.change}, then in {_when(best)} ({_range(best)})." if best is not None else "")


def following(found: QueueAnswer, source: Sequence[str]) -> str:
    """Return the command that asks about the job that waits longest; "" where one was asked about."""
    known = [each for each in found.starts if each.start_s is not None]
    if found.asked is not None or not known:
        return ""
    return shlex.join(["foretrace", "fleet", "live", known[-1].job, *source])
