"""What it costs to turn from one training job to another after every iteration, measured on real processes.

Two PyTorch processes on one core take turns, an iteration each, in three ways. *kept*: both stay where they are, and
whoever is done hands a token to the other. *stopped*: a scheduler stops one process and continues the other (SIGSTOP,
SIGCONT), as Slurm suspends jobs. *swapped*: before it hands on, a job moves weights, buffers and optimizer state to a
shared segment of host memory and gives its own up; at its turn it takes memory again and copies them back. A switch
is the time from the end of one job's iteration to the moment at which the other can begin its own. What caches cost
that the other job has emptied is told apart: CPU time of an iteration by turns over that of one in a row.

Predicted from parts that are measured without any training: the same hand-over between two processes that read an
array larger than the caches, and copies of tensors of other sizes. `study` takes the cost as a share of an iteration.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from foretrace.experiment import processes
from foretrace.experiment.cores import ahead
from foretrace.experiment.ledger import Row
from foretrace.experiment.processes import AskedCall, Workers
from foretrace.experiment.trial import TriedPrediction, figured, in_turns
from foretrace.fleet.workload import Float64
from reproductions.jigsaw.study import packing
from tables import load, machine, table, today

if TYPE_CHECKING:
    from torch import Tensor

MARKS = "<!-- switches: written by make reproduce NAME=jigsaw ARGS=--switch -->", "<!-- end of switches -->"
HEAD = """Two training processes of the zoo on one core, an iteration each by turns (`switching.py`): *kept*, a token is
handed on; *stopped*, a scheduler uses SIGSTOP and SIGCONT; *swapped*, weights, buffers and optimizer state go to shared
host memory and come back. Predicted from parts that no training is in, in every round anew: hand-over between
processes that read an array, copies of other tensors. Range of the prediction, and of the rounds' medians. *Caches*:
CPU time of an iteration by turns over one in a row. *Of an iteration*: both, as the study takes it. The first pair was
looked at while this was written, the others were not. A processor, no GPU: what host links and kernels that still run
cost there is not in it."""
WAYS = ("kept", "stopped", "swapped")
PAIRS = (("resnet50", "bert"), ("vgg11", "lstm-lm"), ("dropout-lstm", "gpt2"))
_TURNS, _ROUNDS = 10, 6
_PATIENCE_S = 120.0
_READS = "reads"  # a job that trains nothing: it reads more than caches hold
_READ_BYTES = 32 << 20
_SETS = ((512, 1 << 10), (128, 16 << 10), (32, 256 << 10), (8, 2 << 20), (4, 8 << 20))  # tensors, bytes of each


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is asked: so many iterations, each at its turn; without `takes` all in a row."""

    job: str  # of the zoo, or `_READS`
    way: str
    turns: int
    takes: str = ""  # pipes that a token comes from and goes to
    gives: str = ""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """When each iteration could begin and when it was done, on the machine's clock; and CPU time that it took."""

    ready_ns: list[int]
    done_ns: list[int]
    cpu_ns: list[int]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a job keeps between iterations."""

    tensors: int
    nbytes: int


class Stepping(NamedTuple):
    """A job in its process: one iteration, and its state in host memory and out of it."""

    step: Callable[[], object]
    swap: Swap


class Swap:
    """Tensors that are moved to a shared segment of host memory and back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        import torch

        self.tensors = list({each.data_ptr(): each for each in tensors if each.numel()}.values())
        self.nbytes = sum(each.numel() * each.element_size() for each in self.tensors)
        self.memory = SharedMemory(create=True, size=max(self.nbytes, 1) + 64 * len(self.tensors))
        self.kept, at = [], 0
        for each in self.tensors:
            flat = torch.frombuffer(self.memory.buf, dtype=each.dtype, count=each.numel(), offset=at)
            self.kept.append(flat.as_strided(each.size(), each.stride()))
            at += -(-each.numel() * each.element_size() // 64) * 64
        self.memory.unlink()  # it lives as long as this process
        self.out()
        self.back()  # the first touch of a page is not part of a switch

    def out(self) -> None:
        """Move them out; their memory is the allocator's again, which keeps it as PyTorch's does on GPUs."""
        import torch

        for mine, kept in zip(self.tensors, self.kept, strict=True):
            kept.copy_(mine)
            mine.data = torch.empty(0, dtype=mine.dtype)

    def back(self) -> None:
        """Take memory, and move them in."""
        for mine, kept in zip(self.tensors, self.kept, strict=True):
            mine.data = kept.clone()


@cache
def _made(job: str) -> Stepping:
    """The job, once in its process, warm."""
    import torch

    torch.set_num_threads(1)
    if job == _READS:
        return Stepping(torch.ones(_READ_BYTES // 4).sum, Swap([]))
    from foretrace.zoo.registry import training

    made = training(job, "tiny").with_batches(2)
    made.model.train()
    batches = made.batches()

    def step() -> object:
        return made.step(next(batches)).item()

    for _ in range(3):
        step()
    states = [
        each for optimizer in made.optimizers for held in optimizer.state.values() for each in held.values()
        if isinstance(each, torch.Tensor)
    ]  # fmt: skip
    return Stepping(step, Swap([*made.model.parameters(), *made.model.buffers(), *states]))


def state_of(given: Turns) -> State:
    """In a process: how much the job keeps."""
    swap = _made(given.job).swap
    return State(tensors=len(swap.tensors), nbytes=swap.nbytes)


def take_turns(given: Turns) -> Taken:
    """In a process: iterate at every turn."""
    step, swap = _made(given.job)
    swaps = given.way == "swapped" and bool(given.takes)
    stops = given.way == "stopped" and bool(given.takes)
    pipes = [os.open(each, os.O_RDWR) for each in (given.takes, given.gives) if each and not stops]
    found = Taken(ready_ns=[], done_ns=[], cpu_ns=[])
    if swaps:
        swap.out()
    for _ in range(given.turns):
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif pipes:
            os.read(pipes[0], 1)
        if swaps:
            swap.back()
        found.ready_ns.append(time.monotonic_ns())
        began = time.thread_time_ns()
        step()
        found.cpu_ns.append(time.thread_time_ns() - began)
        found.done_ns.append(time.monotonic_ns())
        if swaps:
            swap.out()
        if pipes:
            os.write(pipes[1], b"t")
    if swaps:
        swap.back()
    for each in pipes:
        os.close(each)
    return found


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that moving a set of tensors out and back takes."""

    seconds: list[float]


def copies(given: Turns) -> Copied:
    """In a process: sets of tensors that are no model's, moved out and back."""
    import torch

    torch.set_num_threads(1)
    found = []
    for count, size in _SETS:
        swap = Swap([torch.ones(size // 4) for _ in range(count)])
        times = []
        for _ in range(given.turns):
            begin = time.monotonic_ns()
            swap.out()
            swap.back()
            times.append(time.monotonic_ns() - begin)
        found.append(median(times) * 1e-9)
    return Copied(seconds=found)


class ByTurns(NamedTuple):
    """What turns came to, in seconds: every switch, and the median CPU time of an iteration of each job."""

    switches: Float64
    iteration: list[float]


class Pair:
    """Two processes on one core, and a scheduler beside them."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        self.workers = workers
        self.pipes = [str(folder / name) for name in ("first", "second")]
        for each in self.pipes:
            os.mkfifo(each)

    def alone_s(self, jobs: Sequence[str], turns: int) -> list[float]:
        """Median CPU seconds of an iteration of each, one job after the other."""
        found = []
        for rank, job in enumerate(jobs):
            asked = [AskedCall(take_turns, Turns(job=job if rank == at else _READS, way="kept",
                                                 turns=turns if rank == at else 0)) for at in range(2)]  # fmt: skip
            taken = self.workers.ask_each(asked, "iterating alone", patience_s=_PATIENCE_S)[rank]
            found.append(median(taken.cpu_ns) * 1e-9)
        return found

    def by_turns(self, jobs: Sequence[str], way: str, turns: int) -> ByTurns:
        """Both jobs by turns."""
        first, second = self.pipes
        asked = [
            AskedCall(take_turns, Turns(job=job, way=way, turns=turns, takes=takes, gives=gives))
            for job, takes, gives in zip(jobs, (first, second), (second, first), strict=True)
        ]
        self.workers.submit(asked, "taking turns")
        if way == "stopped":
            with ahead():  # the scheduler is no ordinary process either
                self._schedule(turns)
            taken = self.workers.collect(asked, "taking turns")
        else:
            token = os.open(first, os.O_RDWR)  # it is open until both are done, so that no token is lost
            os.write(token, b"t")
            taken = self.workers.collect(asked, "taking turns")
            os.read(token, 1)  # the one that the last turn gave
            os.close(token)
        one, other = taken
        gaps = [*np.subtract(other.ready_ns, one.done_ns)[:-1], *np.subtract(one.ready_ns[1:], other.done_ns[:-1])]
        return ByTurns(np.array(gaps) * 1e-9, [median(each.cpu_ns[1:]) * 1e-9 for each in taken])

    def _schedule(self, turns: int) -> None:
        """Continue one process until it stops again, then the other."""
        pids = [each.pid for each in self.workers.processes]
        for pid in pids:
            os.waitpid(pid, os.WUNTRACED)
        for turn in range(turns):
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
                if turn + 1 < turns:
                    os.waitpid(pid, os.WUNTRACED)


@contextmanager
def pair() -> Iterator[Pair]:
    """Two processes on one core of this machine."""
    core = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, processes.alone(2, cores=(core,), forked=False) as workers:
        yield Pair(workers, Path(folder))


class Parts(NamedTuple):
    """What a prediction rests on, of one round: seconds."""

    hand_over: dict[str, tuple[float, float, float]]  # by way: median, a tenth is below, a tenth above
    per_tensor: float  # out and back
    per_byte: float
    worst: tuple[float, float]  # of the sets, measured over fitted: least and most

    @classmethod
    def measure(cls, both: Pair, turns: int) -> Parts:
        """From processes that train nothing."""
        reading = (_READS, _READS)
        hand = {}
        for way in ("kept", "stopped"):
            middle, low, high = np.quantile(both.by_turns(reading, way, 2 * turns).switches, (0.5, 0.1, 0.9)).tolist()
            hand[way] = middle, low, high
        seconds = np.array(
            both.workers.ask(copies, Turns(job=_READS, way="swapped", turns=turns), "copying", first=True)[0].seconds
        )
        sizes = np.array([(count, count * size) for count, size in _SETS], float)
        # relative errors count: sets differ by four orders of magnitude
        (tensor, byte), *_ = np.linalg.lstsq(sizes / seconds[:, None], np.ones(len(sizes)), rcond=None)
        tensor, byte = max(float(tensor), 0.0), max(float(byte), 1e-13)
        ratio = seconds / (sizes @ np.array([tensor, byte]))
        worst = float(ratio.min()), float(ratio.max())
        return cls({**hand, "swapped": hand["kept"]}, tensor, byte, worst)

    def switch_s(self, way: str, states: Sequence[State]) -> tuple[float, float, float]:
        """Value, least and most of a switch between two jobs: hand-over, and what is copied."""
        (hand, least, most), (low, high), copied = self.hand_over[way], self.worst, 0.0
        if way == "swapped":
            copied = sum(each.tensors * self.per_tensor + each.nbytes * self.per_byte for each in states) / 2
        return hand + copied, least + copied * min(low, 1.0), most + copied * max(high, 1.0)


class Switched(msgspec.Struct, frozen=True, kw_only=True):
    """What turning between two jobs costs in one way."""

    jobs: tuple[str, str]
    way: str
    states: tuple[State, State]
    alone_s: tuple[float, float]  # an iteration of each, CPU time
    predicted_s: tuple[float, float, float]
    rounds_s: tuple[float, ...]  # median switch, by round
    slower: tuple[float, ...]  # CPU time of iterations by turns over in a row, less 1, by round
    each_s: tuple[float, ...]  # what the parts of that round said

    @property
    def share(self) -> float:
        """Of a mean iteration, with what caches cost: what the study takes."""
        return median(self.rounds_s) / (sum(self.alone_s) / 2) + max(median(self.slower), 0.0)

    def trial(self) -> TriedPrediction:
        """Predicted seconds against the rounds."""
        return figured(self.predicted_s, self.rounds_s, each_s=self.each_s)

    def row(self) -> Row:
        """For the ledger."""
        return self.trial().row(
            f"switch-jobs {self.way}", model=" + ".join(self.jobs), size="tiny",
            parameters={
                "way": self.way, "bytes": [each.nbytes for each in self.states], "share": self.share,
                "slower": median(self.slower),
            },
        )  # fmt: skip


def _before(both: Pair, jobs: Sequence[str], turns: int, parts: list[Parts], alone: list[list[float]],
            number: int, _: Any) -> None:  # fmt: skip
    """At the beginning of a round that counts."""
    if number >= 0:
        parts.append(Parts.measure(both, turns))
        alone.append(both.alone_s(jobs, turns))


def _turn(both: Pair, jobs: Sequence[str], turns: int, way: str, _: int) -> ByTurns:
    return both.by_turns(jobs, way, turns)


def measure(
    pairs: Sequence[tuple[str, str]] = PAIRS, *, rounds: int = _ROUNDS, turns: int = _TURNS,
    tell: Callable[[float], None] | None = None,
) -> list[Switched]:  # fmt: skip
    """Every pair in every way, all ways of a pair in turns; the parts are measured at the beginning of every round."""
    found = []
    for at, jobs in enumerate(pairs):
        with pair() as both:
            asked = [AskedCall(state_of, Turns(job=job, way="kept", turns=0)) for job in jobs]
            states = both.workers.ask_each(asked, "making the trainings", patience_s=_PATIENCE_S)
            parts: list[Parts] = []
            alone: list[list[float]] = []

            taken = in_turns(
                WAYS, partial(_turn, both, jobs, turns), rounds, warm_up=1,
                before=partial(_before, both, jobs, turns, parts, alone),
                tell=None if tell is None else partial(_told, tell, at, len(pairs)),
            )  # fmt: skip
        for way in WAYS:
            said = np.array([each.switch_s(way, states) for each in parts])
            found.append(Switched(
                jobs=jobs, way=way, states=(states[0], states[1]),
                alone_s=(median(each[0] for each in alone), median(each[1] for each in alone)),
                predicted_s=(float(np.median(said[:, 0])), float(said[:, 1].min()), float(said[:, 2].max())),
                rounds_s=tuple(float(np.median(each.switches)) for each in taken[way]),
                slower=tuple(
                    sum(each.iteration) / sum(own) - 1 for each, own in zip(taken[way], alone, strict=True)
                ),
                each_s=tuple(said[:, 0].tolist()),
            ))  # fmt: skip
    return found


def _told(tell: Callable[[float], None], at: int, pairs: int, part: float) -> None:
    tell((at + part) / pairs)


def section(found: Sequence[Switched]) -> str:
    """Predicted and measured, and what the study makes of it."""
    rows = []
    for each in found:
        said, low, high = each.trial(), *(each.predicted_s[at] * 1e3 for at in (1, 2))
        rows.append((
            " + ".join(each.jobs), each.way, f"{sum(state.nbytes for state in each.states) / 2e6:.1f}",
            f"{sum(each.alone_s) / 2 * 1e3:.0f}", f"{each.predicted_s[0] * 1e3:.3g} ({low:.2g} – {high:.2g})",
            f"{median(each.rounds_s) * 1e3:.3g} ({min(each.rounds_s) * 1e3:.2g} – {max(each.rounds_s) * 1e3:.2g})",
            said.verdict.value, f"{median(each.slower):+.1%}", f"{each.share:.2%}",
        ))  # fmt: skip
    gains = []
    for way in WAYS:
        shares = sorted(each.share for each in found if each.way == way)
        for workers, exchange in ((2, 0.1), (4, 0.1), (4, 1.0)):
            cells = [packing("first-ready", workers, exchange, 2, share, 64) for share in (0.0, shares[0], shares[-1])]
            gains.append((way, str(workers), f"{exchange:g}", *(
                f"{each.together:+.1%}; {each.partial_share:+.1%}" for each in cells
            )))  # fmt: skip
    return "\n".join([
        MARKS[0], "### What a switch costs, measured", "", f"*{today()}, {machine()}; load {load()}.*", "", HEAD, "",
        table(("jobs", "way", "state MB", "iteration ms", "switch predicted ms", "measured ms", "verdict", "caches",
               "of an iteration"), rows), "",
        "Both effects and what partial backpropagation adds to sharing, two jobs per GPU, first-ready: with free "
        "switches, and with the cheapest and the dearest pair that was measured.", "",
        table(("way", "K", "exchange", "free", "cheapest", "dearest"), gains), MARKS[1],
    ])  # fmt: skip
