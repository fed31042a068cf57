"""`RowRun`: the processes of a training over rows, on this machine's own network or on shaped links."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.experiment.links import netns
from foretrace.experiment.messages import (
    ListenRows,
    MeetRows,
    RowSetup,
    RowTimes,
    TimeRows,
    TrainedRows,
    TrainRows,
)
from foretrace.experiment.processes import START_S, AskedCall, DeadError, Workers, alone
from foretrace.experiment.rows.role import connect, hashes, listen, serve, time_link, train_batches
from foretrace.files import write_text
from foretrace.hardware.cluster import parse_link
from foretrace.reading import read_text
from foretrace.training.rows.kept import forget, recover, whole_batches
from foretrace.training.rows.lookups import Lookups
from foretrace.training.rows.optimizers import row_optimizer

_LOOKUPS, _SETUP = "lookups.npz", "setup.json"


@dataclass(frozen=True, kw_only=True)
class RowWeights:
    """SHA-256 of the tables and of the dense weights, which all trainers have alike."""

    table: str
    dense: str


class RowRun:
    """Trainers and their server, ready. Made by `running`."""

    def __init__(self, workers: Workers, setup: RowSetup, net: netns.Net | None) -> None:
        self._workers, self.setup, self.net, self.done = workers, setup, net, setup.begin
        self.hit_rate = 0.0  # of the last batches that looked ahead

    def train(self, arm: str, begin: int, end: int, *, seconds: float = 0.0) -> list[TrainedRows]:
        """Train batches of an arm; by trainer. Raises ForetraceError where a process ends."""
        calls = [AskedCall(train_batches, TrainRows(arm=arm, begin=begin, end=end))] * self.setup.trainers
        try:
            found = self._workers.ask_each(calls, f"training {arm}", patience_s=seconds + START_S)
        except DeadError as error:
            raise ForetraceError(self._ended(error, begin)) from None
        self.done = end
        if self.setup.folder and self.setup.every and end % self.setup.every == 0:
            forget(Path(self.setup.folder), end)
        if self.setup.look_ahead[arm]:
            hits = sum(each.hits for each in found)
            self.hit_rate = hits / max(hits + sum(each.misses for each in found), 1)
        return found

    def time(self, rows: Sequence[int], repetitions: int) -> list[RowTimes]:
        """Time the link; by trainer."""
        request = TimeRows(rows=tuple(rows), repetitions=repetitions)
        calls = [AskedCall(time_link, request)] * self.setup.trainers
        return self._workers.ask_each(calls, "timing the link", patience_s=3 * START_S)

    def weights(self) -> dict[str, RowWeights]:
        """Return what was trained, by arm."""
        *trainers, server = self._workers.ask(hashes, None, "comparing weights")
        found = {}
        for arm in self.setup.look_ahead:
            dense = {each[arm] for each in trainers}
            if len(dense) > 1:
                raise RuntimeError(f"trainers of {arm} have different dense weights")
            found[arm] = RowWeights(table=server[arm], dense=dense.pop())
        return found

    def _ended(self, error: DeadError, begin: int) -> str:
        """Return one sentence on a process that ended."""
        who = "the row server" if error.rank == self.setup.trainers else f"trainer {error.rank}"
        how = f"was ended by {error.signal}" if error.signal else "ended by itself"
        if not self.setup.folder:
            return f"{who} {how} after batch {begin}; keep weights in `folder=` to continue after such an end."
        kept = whole_batches(Path(self.setup.folder), trainers=self.setup.trainers, width=self.setup.width)
        return f"{who} {how}; {kept} whole batches or more are kept in {self.setup.folder}: continue there."


@contextmanager
def running(lookups: Lookups, setup: RowSetup, *, link: str = "") -> Iterator[RowRun]:
    """Start the processes of a training; ended with the block. `setup.lookups`, `.rows` and `.token` are filled in.

    With a `link` every trainer has a network of its own, whose two directions are shaped to it. With `setup.folder`
    the training continues from what is kept there. Raises ForetraceError where a network or a process cannot be had.
    """
    parsed = parse_link(link) if link else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foretrace-rows-")))
        arrays = {f"{t.name}.{what}": getattr(t, what) for t in lookups.tables for what in ("ids", "offsets")}
        np.savez(folder / _LOOKUPS, **arrays)
        setup = msgspec.structs.replace(
            setup, lookups=str(folder / _LOOKUPS), samples=lookups.samples, token=secrets.token_hex(16),
            rows={table.name: table.rows for table in lookups.tables}, begin=_begin(setup, lookups),
        )  # fmt: skip
        net = None
        if parsed is None:
            workers = stack.enter_context(alone(setup.trainers + 1))
            hosts = ["127.0.0.1"] * (setup.trainers + 1)
        else:
            net = stack.enter_context(netns.made(setup.trainers, parsed, servers=1))
            workers, hosts = stack.enter_context(netns.inside(net)), list(net.addresses)
        begins: list[AskedCall[Any]] = [
            AskedCall(listen, ListenRows(setup=setup, rank=rank, host=hosts[rank])) for rank in range(setup.trainers)
        ]
        serving = AskedCall(serve, ListenRows(setup=setup, rank=setup.trainers, host=hosts[-1]))
        *ports, arms = workers.ask_each([*begins, serving], "starting", patience_s=START_S)
        meet = MeetRows(server=hosts[-1], ports=arms, trainers=tuple(zip(hosts, ports, strict=False)))
        workers.ask_each([AskedCall(connect, meet)] * setup.trainers, "meeting", patience_s=START_S)
        yield RowRun(workers, setup, net)


def train(lookups: Lookups, setup: RowSetup, *, batches: int = 0, link: str = "") -> RowWeights:
    """Train the one arm of a setup for so many batches, by default all; what it came to.

    With a folder every batch is logged there, and all weights are written every so many. A training that was ended, at
    any point and however, continues after the last whole batch, to the bits of one that was not. Raises ForetraceError
    in one sentence where a process ends.
    """
    (arm,) = setup.look_ahead
    end = batches or lookups.batches
    with running(lookups, setup, link=link) as run:
        every = setup.every or end
        while run.done < end:
            run.train(arm, run.done, min((run.done // every + 1) * every, end))
        return run.weights()[arm]


def _begin(setup: RowSetup, lookups: Lookups) -> int:
    """Return from which batch on to train. Raises ForetraceError where the folder is another training's."""
    if not setup.folder:
        return 0
    folder = Path(setup.folder)
    same = msgspec.structs.replace(setup, begin=0, compute_s=0.0, look_ahead=dict.fromkeys(setup.look_ahead, 0))
    like = msgspec.json.encode(same).decode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForetraceError(f"{folder} cannot be used ({error.strerror}); choose a folder of yours.") from None
    if not (folder / _SETUP).exists():
        write_text(folder / _SETUP, like)
    elif read_text(folder / _SETUP, mend="choose another folder") != like:
        raise ForetraceError(f"{folder} holds weights of another training; choose another `folder=`.")
    rule = row_optimizer(setup.optimizer)
    shape = (sum(table.rows for table in lookups.tables), setup.width + rule.state)
    return recover(folder, trainers=setup.trainers, shape=shape, optimizer=rule)
