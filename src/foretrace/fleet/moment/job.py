"""`JobState`: all that the step-by-step engine knows of one job at a moment."""

from __future__ import annotations

from dataclasses import dataclass, field

FUTURE, WAITING, RUNNING, DONE = "future", "waiting", "running", "done"


@dataclass(slots=True, eq=False)
class JobState:
    """One job. `gpus` it holds, or has released in this decision where it `reclaims` them unless others take them."""

    at: int  # position in the workload
    wanted: int  # GPUs asked for
    fewest: int
    most: int
    share: float
    submit: int
    work: float
    remaining: float
    estimate: float
    key: float
    restart: int
    demand: int  # class of (GPUs, kinds allowed)
    size: int  # class of GPUs alone
    tenant: int
    eager: bool
    status: str = FUTURE
    gpus: list[int] = field(default_factory=list)
    level: int = 0  # of the smallest unit around them, 0 the innermost units
    part: float = 0  # devices that count as its own: all of them where it shares none
    rate: float = 0.0
    talking: float = 0.0
    reclaims: bool = False
    band: int = 0
    last: int = 0  # when it last gained or lost GPUs
    lease_end: int = 0
    finish_at: int = 0
    mark: int = 0  # up to here progress is counted
    ready: int = 0  # from here it progresses
    fresh: int = 0  # when this stretch began to progress: what a failure can lose
    pace: list[tuple[int, float]] = field(default_factory=list)  # (since, speed) within this stretch
    stretch: int = 0
    stretch_dead: int = 0
    first: int = -1
    ended: int = -1
    held: int = 0
    dead: int = 0
    talk: float = 0.0
    gpu_ns: float = 0.0
    starts: int = 0
    preempted: int = 0
    failed: int = 0
    cause: int = 0
    cause_since: int = 0
    when: int = -1  # its event in the heap, −1 none
