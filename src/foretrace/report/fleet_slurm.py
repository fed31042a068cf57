"""What meets a real scheduler, as answers: `foretrace fleet live`, a queue played on, and `fleet rig`, held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foretrace.fleet.live.questions import ClusterChange, ForecastStart, QueueAnswer, Sooner
from foretrace.fleet.rig.against import Against, RigErrors, StartError
from foretrace.fleet.rig.play import RigRun
from foretrace.report.blocks import Block, Column, listing, table
from foretrace.report.names import command
from foretrace.report.units import count, digits, long_time, seconds, share
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
            (_range, Column("80 % range", right=True)), ("helps", "", "yes"),
            ("command", Column("command", wide=True)), ("risk", Column("but", wide=True)),
        )  # fmt: skip
        yield listing(
            self.changes, "change", ("before_s", "mean wait from now", "long"), ("after_s", "then", "long"),
            ("ratio", "ratio", "ratio"),
            (lambda each: f"{each.low:.2f} – {each.high:.2f}", Column("80 % range", right=True)),
        )  # fmt: skip
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
    return command("fleet", "live", known[-1].job, *source)


class FleetRigView(Report, frozen=True, kw_only=True):
    """`foretrace fleet rig`: a workload on a real scheduler, beside the simulation of it."""

    command: str = "fleet rig"
    source: str
    policy: str
    nodes: int
    gpus: int
    racks: int
    speedup: float
    jobs: int
    repeats: int
    seconds: float
    mean_jct_s: float
    simulated_mean_jct_s: float
    start_error_s: StartError
    jct_error: float
    jct_worst_s: float
    order_equal: float
    within: float
    switches_equal: float
    launch_s: float
    repeat_jct_difference: float | None
    repeated: RigErrors | None

    def shown(self, top: int) -> Iterator[Block]:
        """Yield errors of the simulation, beside the differences between runs."""
        always, wide = ("start, mean", "p95"), ("worst", "JCT", "order", "switches")
        yield table(
            ["against the run", *(Column(name, right=True) for name in always),
             *(Column(name, right=True, extra=True) for name in wide)],
            [
                [name, *map(seconds, (each.start_error_s.mean, each.start_error_s.p95, each.start_error_s.worst)),
                 *map(share, (each.jct_error, each.order_equal, each.switches_equal))]
                for name, each in (("simulated", self), ("another run", self.repeated)) if each is not None
            ],
        )  # fmt: skip


def _mean_jct_s(runs: Sequence[RigRun]) -> float:
    return sum(float(each.jct_s.mean()) for each in runs) / len(runs)


def rig(found: Against, *, on: str, source: str, policy: str, speedup: float, next_: str) -> FleetRigView:
    """Return the answer of a rig."""
    jobs, again = len(found.ran[0].start_s), found.repeated
    notes = [f"times are on the rig's clock: a second stands for {digits(speedup)} s of the workload."]
    if again is None:
        notes.append("one run: what the scheduler itself differs by is not known; repeat with --repeats 3.")
    return taken(
        FleetRigView, found, found.errors, found.setup, source=source, policy=policy, speedup=speedup, jobs=jobs,
        repeats=len(found.ran), mean_jct_s=_mean_jct_s(found.ran), simulated_mean_jct_s=_mean_jct_s(found.simulated),
        launch_s=sum(each.launch_s for each in found.ran) / len(found.ran),
        repeat_jct_difference=None if again is None else again.jct_error, notes=tuple(notes), next=next_,
        headline=f"{count(jobs)} jobs ran on a private {on.capitalize()} of {count(found.setup.nodes)} nodes; the "
        f"simulation misses their completion times by {share(found.errors.jct_error)}, their starts by "
        f"{seconds(found.errors.start_error_s.mean)}.",
    )  # fmt: skip
