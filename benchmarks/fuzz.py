"""Damaged files for every reader: none may end in a traceback, a crash, a hang, or a number that cannot be.

    python benchmarks/fuzz.py --inputs 100000            # so many over all readers, in turn
    python benchmarks/fuzz.py --seconds 60 --reader recording --reader graph
    python benchmarks/fuzz.py --again recording:gpu.json:3:4711 --minimise

Readers and their samples: tests/fuzz; damage: tests/fuzz/mutations.py. An input is named reader:sample:seed:number
and follows from its name alone. Inputs run in a worker process with bounded memory; one that takes longer than --hang
seconds of processor time (or six times as long by the clock, on a machine that others use), or ends the process, is a
defect too and the worker is replaced. Exit code 1 where there is any defect.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

from tables import ROOT, machine, today

sys.path.insert(0, str(ROOT))

from tests.fuzz.mutations import FORMS, mutated
from tests.fuzz.reader import WAYS, Reader, check
from tests.fuzz.readers import readers

HANG_S = 10.0
MEMORY = 6 << 30  # bytes that a worker may reserve beyond what it has when it begins
BATCH = 200  # inputs that a worker takes at a time


@dataclass(frozen=True, slots=True)
class Input:
    """One damaged file, by name."""

    reader: str
    sample: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.reader}:{self.sample}:{self.seed}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Input:
        """From what `str` gives."""
        reader, sample, seed, number = text.rsplit(":", 3)
        return cls(reader, sample, int(seed), int(number))

    def made(self, data: bytes) -> tuple[bytes, int]:
        """The file, and the way to read it (`Reader.play`)."""
        dice = Random(str(self))
        way = dice.randrange(WAYS)
        return mutated(data, form_of(self.sample), dice), way


def form_of(name: str) -> str:
    """The ending of a sample's name that mutations know."""
    return next((form for form in sorted(FORMS, key=len, reverse=True) if name.endswith("." + form)), "")


def verdict(reader: Reader, path: Path, way: int) -> str:
    """What is wrong with an input and where; nothing for a result that can be, "refused" for a sentence."""
    from foretrace.errors import ForetraceError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for name, value in reader.play(path, way):
                if bad := check(name, value):
                    return f"figure: {reader.name}: {bad}"
    except ForetraceError as error:
        text = str(error)
        if not text.strip() or "\n" in text.strip() or len(text) > 4000:
            return f"no sentence: {type(error).__name__} in {_place(error)}: {text[:80]!r}"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__} in {_place(error)}: {' '.join(str(error).split())[:80]}"
    return ""


def _place(error: Exception) -> str:
    """The last line of ours that the error passed, and the one where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/foretrace/" in each.filename] or frames
    last = ours[-1]
    return f"{last.filename.rpartition('/foretrace/')[2]}:{last.lineno} {last.name}"


# --- worker -----------------------------------------------------------------------------------------------------------


def work(tasks: Connection, answers: Connection, hang_s: float) -> None:
    """Try inputs as they come; say before each one which it is."""
    known, made = readers(), {}
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        while (batch := tasks.recv()) is not None:
            for each in batch:
                answers.send(("begins", each))
                if each.reader not in made:
                    made[each.reader] = known[each.reader].samples()
                data, way = each.made(made[each.reader][each.sample])
                path = Path(folder) / each.sample
                path.write_bytes(data)
                for _ in range(2):
                    begun = time.process_time()
                    found = verdict(known[each.reader], path, way)
                    seconds = time.process_time() - begun
                    if seconds < hang_s:
                        break
                    path.write_bytes(data)  # again: what was compiled the first time does not count
                answers.send(("ends", found, seconds))
            answers.send(("idle",))


@dataclass(kw_only=True)
class Worker:
    """A process that tries inputs, replaced when one hangs or ends it."""

    hang_s: float
    process: BaseProcess = field(init=False)
    tasks: Connection = field(init=False)
    answers: Connection = field(init=False)
    at: Input | None = None  # what it is at, and since when, by the clock and by the processor
    since: float = 0.0
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("fork")  # readers are loaded once
        theirs, self.tasks = context.Pipe(duplex=False)
        self.answers, mine = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(theirs, mine, self.hang_s), daemon=True)
        self.process.start()
        theirs.close()
        mine.close()
        self.at = None

    def begin(self, each: Input) -> None:
        """Note what it is at."""
        self.at, self.since, self.spent = each, time.monotonic(), self.cpu_s()

    def cpu_s(self) -> float:
        """Seconds of processor time that the process has used."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def hangs(self, limit_s: float) -> bool:
        """Whether it has been at one input for too long."""
        if self.at is None or time.monotonic() - self.since <= limit_s:
            return False
        return self.cpu_s() - self.spent > limit_s or time.monotonic() - self.since > 6 * limit_s

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.tasks.close()
        self.answers.close()


@dataclass(slots=True)
class Tally:
    """What became of the inputs of one reader."""

    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0


@dataclass(slots=True)
class Findings:
    """Counts by reader, and defects with their first few inputs."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    defects: dict[str, list[Input]] = field(default_factory=dict)

    def note(self, each: Input, found: str, seconds: float = 0.0) -> None:
        tally = self.tallies.setdefault(each.reader, Tally())
        tally.inputs += 1
        tally.slowest_s = max(tally.slowest_s, seconds)
        if not found:
            tally.read += 1
        elif found == "refused":
            tally.refused += 1
        else:
            if found not in self.defects:
                print(f"  {each}  {found}", flush=True)
            self.defects.setdefault(found, []).append(each)


def run(inputs: Iterator[Input], *, until: float, hang_s: float, workers: int) -> Findings:
    """Try all inputs, or as many as fit before `until` (monotonic seconds)."""
    found = Findings()
    crew = [Worker(hang_s=hang_s) for _ in range(workers)]
    waiting: dict[int, list[Input]] = {}  # given to a worker and not yet done
    strikes: dict[Input | None, float] = {}  # inputs that took too long, and how much longer they may
    left = True

    def give(i: int) -> bool:
        nonlocal left
        batch = waiting.get(i) or []
        while left and len(batch) < BATCH and time.monotonic() < until:
            each = next(inputs, None)
            if each is None:
                left = False
            else:
                batch.append(each)
        waiting[i] = batch
        if batch:
            crew[i].tasks.send(list(batch))
        return bool(batch)

    busy = {i for i in range(workers) if give(i)}
    while busy:
        connections = [crew[i].answers for i in busy]
        multiprocessing.connection.wait(connections, timeout=0.5)
        for i in sorted(busy):
            worker = crew[i]
            dead = False
            try:
                while worker.answers.poll():
                    match worker.answers.recv():
                        case ("begins", each):
                            worker.begin(each)
                        case ("ends", verdict, seconds):
                            assert worker.at is not None
                            waiting[i].pop(0)
                            slow = f"hang: {worker.at.reader}" if seconds > hang_s else ""
                            found.note(worker.at, slow or verdict, seconds)
                            worker.at = None
                        case _:
                            if not give(i):
                                busy.discard(i)
            except (EOFError, ConnectionError):
                dead = True
            hangs = worker.hangs(hang_s * strikes.get(worker.at, 1.0))
            if dead or hangs:
                worker.stop()
                if hangs and worker.at is not None and worker.at not in strikes:
                    strikes[worker.at] = 6.0  # a loop may be compiled for the first time: once more, with patience
                elif worker.at is not None:
                    what = (
                        f"hang: {worker.at.reader}"
                        if hangs
                        else f"crash ({worker.process.exitcode}): {worker.at.reader}"
                    )
                    found.note(worker.at, what, time.monotonic() - worker.since)
                    waiting[i].pop(0)
                worker.start()
                if not give(i):
                    busy.discard(i)
    for worker in crew:
        worker.stop()
    return found


# --- which inputs -----------------------------------------------------------------------------------------------------


def inputs_of(names: Sequence[str], *, seed: int, first: int, count: int | None) -> Iterator[Input]:
    """Inputs of these readers in turn, each of its samples in turn; without `count` for ever."""
    known = {name: sorted(readers()[name].samples()) for name in names}
    known = {name: samples for name, samples in known.items() if samples}
    number, given = first, 0
    while True:
        for name, samples in known.items():
            if count is not None and given >= count:
                return
            yield Input(name, samples[number % len(samples)], seed, number)
            given += 1
        number += 1


# --- one input again --------------------------------------------------------------------------------------------------


def again(each: Input, *, minimise: bool, out: Path | None) -> str:
    """Try one input in this process; with `minimise`, cut away what does not matter. What is wrong with it."""
    reader = readers()[each.reader]
    data, way = each.made(reader.samples()[each.sample])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / each.sample

        def wrong(content: bytes) -> str:
            path.write_bytes(content)
            return verdict(reader, path, way)

        found = wrong(data)
        print(f"{each}, way {way}, {len(data):,} bytes: {found or 'read'}")
        if minimise and found not in ("", "refused"):
            data = smallest(data, lambda content: wrong(content).split(":")[0] == found.split(":")[0])
            print(f"{len(data):,} bytes show the same:\n{data[:2000]!r}")
        if out is not None:
            out.write_bytes(data)
            print(f"wrote {out}")
        if found not in ("", "refused"):
            path.write_bytes(data)
            for name, value in reader.play(path, way):  # with its traceback
                if bad := check(name, value):
                    raise AssertionError(bad)
    return found


def smallest(data: bytes, still: Callable[[bytes], bool]) -> bytes:
    """Delete ever smaller pieces as long as `still` holds (Zeller and Hildebrandt, 2002, simplified)."""
    size = max(len(data) // 2, 1)
    while size:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if still(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def main() -> int:
    """Parse, run, print."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--inputs", type=int, help="how many in all; without it until --seconds are over")
    parse.add_argument("--seconds", type=float, help="time budget")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--first", type=int, default=0, help="number of the first input of each reader")
    parse.add_argument("--reader", action="append", help="by default all")
    parse.add_argument("--workers", type=int, default=1)
    parse.add_argument("--hang", type=float, default=HANG_S, help="seconds after which an input counts as a hang")
    parse.add_argument("--list", action="store_true", help="name the readers and their samples")
    parse.add_argument("--again", metavar="INPUT", help="one input: reader:sample:seed:number")
    parse.add_argument("--minimise", action="store_true")
    parse.add_argument("--out", type=Path, help="keep the input of --again")
    asked = parse.parse_args()
    if asked.list:
        for name, reader in readers().items():
            print(f"{name:<18} {', '.join(reader.samples())}")
        return 0
    if asked.again:
        found = again(Input.parse(asked.again), minimise=asked.minimise, out=asked.out)
        return int(found not in ("", "refused"))
    if unknown := set(asked.reader or ()) - set(readers()):
        parse.error(f"there is no reader {min(unknown)}; there are {', '.join(readers())}")
    if asked.inputs is None and asked.seconds is None:
        parse.error("give --inputs, --seconds or both")
    names = asked.reader or list(readers())
    warm(names)
    print(f"{today()}, {machine()}\nseed {asked.seed}, first {asked.first}, {len(names)} readers", flush=True)
    begun = time.monotonic()
    inputs = inputs_of(names, seed=asked.seed, first=asked.first, count=asked.inputs)
    until = begun + asked.seconds if asked.seconds else float("inf")
    findings = run(inputs, until=until, hang_s=asked.hang, workers=asked.workers)
    return report(findings, time.monotonic() - begun)


def warm(names: Sequence[str]) -> None:
    """Read whole samples once, so that what is loaded and compiled then does not count; they must be sound."""
    for name in names:
        for sample, data in readers()[name].samples().items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / sample
                path.write_bytes(data)
                for way in (1, WAYS - 1):
                    found = verdict(readers()[name], path, way)
                    if found not in ("", "refused") or (found and way == 1):
                        raise SystemExit(f"{name}: the whole sample {sample} is no good to begin with: {found}")


def report(found: Findings, seconds: float) -> int:
    """Counts by reader, then defects; 1 where there are any."""
    total: Counter[str] = Counter()
    wrong = Counter(each.reader for group in found.defects.values() for each in group)
    print(f"\n{'reader':<18} {'inputs':>8} {'read':>8} {'refused':>8} {'defects':>8} {'slowest':>9}")
    for name, each in found.tallies.items():
        row = {"inputs": each.inputs, "read": each.read, "refused": each.refused, "defects": wrong[name]}
        total.update(row)
        print(f"{name:<18} " + " ".join(f"{value:>8,}" for value in row.values()) + f" {each.slowest_s:>7.2f} s")
    print(f"{'all':<18} " + " ".join(f"{total[key]:>8,}" for key in ("inputs", "read", "refused", "defects")))
    print(f"{seconds:,.0f} s, {60 * total['inputs'] / max(seconds, 1e-9):,.0f} inputs a minute")
    for what, inputs in sorted(found.defects.items(), key=lambda item: -len(item[1])):
        print(f"{len(inputs):>6,}  {what}\n        {', '.join(map(str, inputs[:3]))}")
    return int(bool(found.defects))


if __name__ == "__main__":
    sys.exit(main())
