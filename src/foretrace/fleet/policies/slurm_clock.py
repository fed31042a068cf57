"""When Slurm decides (22.05): turns of slurmctld's background thread, and looks of its backfill scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretrace.fleet.policies.slurm_options import SchedulerParameters
from foretrace.fleet.setup import NEVER
from foretrace.fleet.workload import SECOND

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View


def following(first: int, every: int, after: int) -> int:
    """Return the first time after this one of those that lie so far apart; all in ns."""
    return after + every - (after - first) % every


@dataclass(slots=True)
class SlurmClock:
    """Times in ns of the simulation, but `changed` and `looked` in whole Unix seconds, as difftime() compares them."""

    parameters: SchedulerParameters
    epoch: int  # Unix time of the simulation's zero
    turn: int  # how long a turn of the background thread takes
    full: int  # the last pass over the whole queue; at first, when the thread wakes
    looks: int  # when the backfill scheduler wakes next; NEVER without one
    last: int = -(10**12)  # the main scheduler's last pass
    next: int = NEVER  # and its next one
    asked: bool = False  # for a pass, by something that happened since
    looked: int = -1  # when the backfill scheduler looked last
    changed: int = 0  # when jobs or nodes changed last
    crowd: tuple[int, int] = (0, 0)  # jobs that waited and ran when it was noted last

    def backfills(self, now: int) -> bool:
        """Return whether the backfill scheduler looks now: where something changed since it did (_more_work)."""
        return self.looks == now and self.changed >= self.looked

    def note(self, view: View) -> bool:
        """Return whether jobs came, started or ended since this was asked last."""
        crowd = len(view.waiting), len(view.running)
        news, self.crowd = crowd != self.crowd, crowd
        if news:
            self.change(view.now_ns)
        return news

    def change(self, now: int) -> None:
        """Take note that jobs or nodes changed."""
        self.changed = self.epoch + now // SECOND

    def catch_up(self, now: int) -> None:
        """Catch up on passes and looks that found nobody waiting, which were not played."""
        while self.looks < now:
            self._look()
        if self.next < now:
            self._passed(self.next)
            self.next = NEVER

    def decided(self, view: View, *, told: bool, idle: bool) -> None:
        """Work out the next pass. told: an operator or a reservation changed nodes now; idle: nothing happened."""
        now, tried = view.now_ns, view.now_ns == self.next
        self.note(view)
        if told or (tried and len(view.waiting) > 1):  # a pass updates those that it does not try, too
            self.change(now)
        self.catch_up(now)
        if tried:
            self._passed(now)
        elif told or not (idle or self.looks == now):
            self.asked = True
        if self.looks == now:
            self._look()
        zero, due = self.epoch * SECOND, self.full + self.parameters.sched_interval * SECOND
        if self.asked:  # whole seconds
            due = min(due, (zero + self.last) // SECOND * SECOND + self.parameters.batch_sched_delay * SECOND - zero)
        due = max(due, now + 1)
        self.next = due + (self.full - due) % self.turn

    def _passed(self, at: int) -> None:
        self.last, self.asked = at, False
        if at - self.full >= self.parameters.sched_interval * SECOND:
            self.full = at

    def _look(self) -> None:
        """Wake the backfill scheduler; where it has nothing to do, it sleeps for a second instead of its interval."""
        works = self.changed >= self.looked
        self.looked = self.epoch + self.looks // SECOND if works else self.looked
        self.looks += self.parameters.bf_interval * SECOND if works else SECOND
