"""What is asked of the processes that measure, and what they answer: one JSON line each, over pipes.

A request names a function of a module: it takes one thing that msgspec can write, and the `Worker` where it wants what
the process keeps. Its annotations say how both ways are read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from foretrace.cost.network.network import CollectiveKind


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an arm: a training, and the techniques that are applied to it on every worker."""

    work: str  # an emulation ("12x1mb/20ms"), or a model of the zoo, or a script
    size: str = "tiny"
    seed: int = 0
    techniques: tuple[str, ...] = ()
    loads: bool = False  # whether steps take batches from the loader; else batches were made once and lie ready


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """The first request: who you are, and where the others meet."""

    rank: int
    workers: int
    address: str
    port: int
    threads: int
    patience_s: float  # how long a collective may take before it gives up
    backend: str = "gloo"


def meet(given: Join, worker: Worker) -> None:
    """Settle threads and meet the others."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(given.threads)
    worker.rank, worker.workers = given.rank, given.workers
    dist.init_process_group(
        given.backend,
        init_method=f"tcp://{given.address}:{given.port}",
        rank=given.rank,
        world_size=given.workers,
        timeout=timedelta(seconds=given.patience_s),
    )
    if given.backend == "gloo":  # NCCL would take every worker to have the first GPU
        dist.barrier()
    gc.collect()
    gc.freeze()


class Collectives(msgspec.Struct, frozen=True, kw_only=True):
    """Time collectives of these kinds and sizes; the first worker writes the table.

    `per_node`, `busy`: as of `measure_collectives`, for a link of each worker's own that saves up credit.
    """

    kinds: tuple[CollectiveKind, ...]
    sizes: tuple[int, ...]  # bytes, as `cost.network` counts them
    repetitions: int
    wanted_spread: float  # a size that varies more is measured again
    name: str
    table: str  # file
    per_node: int = 1
    busy: bool = True
    told: bool = False  # whether the first worker says how far it is


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Record the training of one worker alone, and save its graph; for a process that has joined no other."""

    setup: Setup
    arms: tuple[tuple[str, ...], ...]  # techniques whose operators are to be timed alone, by arm
    threads: int
    graph: str  # file
    evict: tuple[str, ...] = ()  # files that are taken out of the page cache before every attempt


class Make(msgspec.Struct, frozen=True, kw_only=True):
    """Make an arm under this name."""

    name: str
    setup: Setup


class TryExchanges(msgspec.Struct, frozen=True, kw_only=True):
    """Make steps of a training with exchanges that nobody but this worker takes part in."""

    setup: Setup
    technique: str


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Run steps of an arm: `discarded` ones first, then `steps` that are timed together.

    `together`: all workers begin the timed steps at once, so that none begins early what another one ends late.
    """

    name: str
    discarded: int
    steps: int
    together: bool


class ExchangeRows(msgspec.Struct, frozen=True, kw_only=True):
    """Read batches of lookups from tables that are divided as a placement says, and in training send gradients back."""

    placement: str  # file
    lookups: str  # as `lookups.read` takes them
    samples: int
    batches: tuple[int, ...]
    check: bool  # whether to compare with whole tables instead of timing


class TimeMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Time messages of so many `bytes` (workers, workers) from every worker to every other, all at once."""

    bytes: tuple[tuple[int, ...], ...]


class RowSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A training over rows of an embedding server: what all of its processes know."""

    lookups: str = ""  # file
    samples: int = 0  # of a batch
    rows: dict[str, int] = {}  # by table
    trainers: int
    look_ahead: dict[str, int]  # batches, by arm; 0 is uncached. Each arm has a server and dense weights of its own.
    width: int = 32  # weights of a row
    layers: tuple[int, ...] = (32,)  # of each dense network
    optimizer: str = "sgd"
    compute_s: float = 0.0  # that the passes of a batch take at least
    seed: int = 0
    folder: str = ""  # where tables and dense weights are kept
    every: int = 0  # batches
    begin: int = 0  # batches that are in what is kept
    token: str = ""


class ListenRows(msgspec.Struct, frozen=True, kw_only=True):
    """Be a trainer, where the others can connect, or the server of every arm."""

    setup: RowSetup
    rank: int
    host: str


class MeetRows(msgspec.Struct, frozen=True, kw_only=True):
    """Connect with the servers and the other trainers."""

    server: str  # address
    ports: dict[str, int]  # by arm
    trainers: tuple[tuple[str, int], ...]


class TrainRows(msgspec.Struct, frozen=True, kw_only=True):
    """Train some batches of an arm."""

    arm: str
    begin: int
    end: int


class Worker:
    """What a process keeps between two requests, and how it says what it does."""

    def __init__(self, say: Callable[[str, float], None]) -> None:
        self.rank, self.workers, self.during = 0, 1, ""
        self.kept: dict[str, Any] = {}
        self._say = say

    def tell(self, what: str, share: float) -> None:
        """Say what is done now, and how far it has come."""
        self.during = what
        self._say(what, share)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Call a function, as in "module:name"; without one, leave."""

    function: str
    given: msgspec.Raw = msgspec.Raw(b"null")


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag="returned"):
    """JSON of what the function made."""

    made: msgspec.Raw


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """What the worker does now, and how far it has come with it; an answer follows."""

    what: str
    share: float


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A recording was made; so many operators were timed alone."""

    operators: int
    notes: tuple[str, ...]


class TimedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of an arm: wall and CPU seconds per step, and the last loss (None where it is not a finite number)."""

    wall_s: float
    cpu_s: float
    loss: float | None
    queued_s: float = 0.0  # per step, for which threads but the loader's waited for a core; 0 where that is unknown


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the buckets that gradients were exchanged in, in the order of the exchange; empty where none are."""

    first: tuple[int, ...]  # of the first step
    rebuilt: tuple[int, ...]  # since then, in the order in which gradients became ready; empty if they stayed
    world: int


class ExchangedRows(msgspec.Struct, frozen=True, kw_only=True):
    """What a process exchanged in each batch, and seconds per batch, or how its sums and gradients compare."""

    bytes: tuple[int, ...]
    wall_s: float
    equal: bool  # sums, bit by bit
    gradient_error: float  # largest difference over the largest gradient


class TrainedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that were trained: seconds from the first one's beginning until each had ended."""

    ends_s: tuple[float, ...]
    hits: int
    misses: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A mistake in what was asked for, or a technique that does not fit."""

    sentence: str


class Crashed(msgspec.Struct, frozen=True, kw_only=True, tag="crashed"):
    """Something was raised, in a frame of the last of these files."""

    error: str
    trace: str
    during: str
    files: tuple[str, ...]


Answer = Progress | Returned | Refusal | Crashed
