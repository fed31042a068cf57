"""Shockwave's own policy (Zheng et al., NSDI 2023): Nash welfare over a window of future rounds, planned by a MIP.

Source: uw-mad-dash/shockwave 8a44f4a, scheduler/shockwave.py, scheduler/JobMetaData.py and scheduler/configurations
(MIT). HiGHS stands in for Gurobi, with the published gap and time limit. What differs from the published program:
- Rounds of a window are alike to its first MIP, so jobs get a number of rounds there (rounds are told apart where
  numbers do not fit one by one); a second MIP, the published ranking, says which. The published program ranks only
  where it gave up its fairness constraints; otherwise which rounds a job gets is left to the solver. Here all jobs
  are then ranked alike.
- The logarithm is concave, so its pieces need no binary variables.
- Priorities (ratio to the 12th and 100th power) count 1e6 at most, above which a solver sees nothing else.
- Measured speeds never contradict the profile here, so the correction of the profile by them is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.fleet.workload import Float64, Int64
from reproductions.shockwave.profile import Job

if TYPE_CHECKING:
    from reproductions.shockwave.rounds import Fleet

BASES = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # where the logarithm is exact
LOGS = np.log(np.maximum(BASES, 1e-6))
LOUDEST = 1e6  # largest priority
_PUBLISHED = {32: (1e-3, 12.0), 64: (1e1, 5.0), 128: (1e-3, 15.0), 256: (1e5, 5.0)}  # GPUs -> k, power


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Published settings. k: weight of the longest remaining time; power: of the ratio by which a job is late."""

    k: float
    power: float
    window: float = 20.0  # rounds planned ahead
    again: float = 8.0  # rounds after which a plan is made anew
    ratio: float = 1.0  # of finish time to fair finish time that is allowed
    gap: float = 1e-3
    limit_s: float = 15.0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of what may be set."""
        return tuple(each.name for each in fields(cls))

    @classmethod
    def of(cls, gpus: int, options: Mapping[str, str]) -> Settings:
        """Published for the nearest size of cluster, with what the user says; raises ForetraceError for no number."""
        k, power = _PUBLISHED[min(_PUBLISHED, key=lambda size: abs(math.log(size / gpus)))]
        said: dict[str, float] = {"k": k, "power": power}
        for key, text in options.items():
            try:
                said[key] = float(text)
            except ValueError:
                said[key] = math.nan
            if not 0 < said[key] < math.inf or (key in ("window", "again") and said[key] != int(said[key])):
                raise ForetraceError(f"option market_{key}={text} must be a number above zero.")
        return cls(**said)


class Bids:
    """What the market knows of one job. epoch_s: (epochs,) whole seconds ≥ 1; batch: (epochs,) int64."""

    def __init__(self, job: Job, gpus: int, submit_s: float) -> None:
        whole = np.ceil(job.ends - 1e-9).astype(np.int64)
        phase = np.searchsorted(whole, np.arange(whole[-1]), side="right")
        self.epoch_s = np.maximum(1.0, np.round(job.epoch_s))[phase]
        self.batch: Int64 = job.batch[phase]
        self.epochs, self.gpus, self.submit_s = len(phase), gpus, submit_s
        self.done = 0  # whole epochs
        self.fair: list[tuple[int, float]] = []  # round, estimate of the finish time on an equal part
        self.sizes = np.unique(self.batch)
        self.mean_s = np.array([self.epoch_s[self.batch == size].mean() for size in self.sizes])

    @property
    def left_s(self) -> float:
        """Seconds that remain, as batch sizes seen so far and an even prior let expect (Dirichlet posterior)."""
        seen = np.array([(self.batch[: self.done + 1] == size).sum() for size in self.sizes])
        weight = self.epochs / len(self.sizes) + seen
        expected = self.epochs * weight / weight.sum()
        expected -= np.minimum(seen, np.floor(expected))
        left = self.epochs - self.done
        inflated = max(int(expected.sum() + 1), left)
        return 1.0 if left <= 0 else float(expected @ self.mean_s) * left / inflated

    @property
    def pace_s(self) -> float:
        """Mean seconds of the epochs so far and the present one."""
        return float(self.epoch_s[: self.done + 1].mean())

    def fair_finish(self, now: int) -> float:
        """Average of the estimates, each weighted by the rounds it stood, with a tenth of the last one."""
        rounds = np.diff([r for r, _ in self.fair] + [now])
        values = np.array([v for _, v in self.fair])
        # Where no round has passed the published program keeps a single weight, which meets the first estimate.
        mean = float(rounds @ values / rounds.sum()) if rounds.max() > 0 else float(values[0])
        return 0.9 * mean + 0.1 * float(values[-1])


class Market:
    """Who runs in a round, by a plan for the next rounds that is made anew when jobs come or leave, and regularly."""

    def __init__(self, settings: Settings, gpus: int, round_s: float) -> None:
        self.settings, self.gpus, self.round_s = settings, gpus, round_s
        self.jobs: dict[int, Bids] = {}
        self.plan: dict[int, list[int]] = {}
        self.round, self.unfair, self.plans = -1, 0, 0

    def ran(self, job: int, seconds: float) -> None:
        """Progress is read from the fleet; nothing to note."""

    def stopped(self, job: int) -> None:
        """Nothing to note."""

    def choose(self, now: float, index: int, fleet: Fleet) -> list[int]:
        """Positions of the jobs of round `index`."""
        self.round = index
        new = [job for job in fleet.present if job not in self.jobs]
        gone = set(self.jobs).difference(fleet.present)
        for job in gone:
            del self.jobs[job]
        for job in new:
            self.jobs[job] = Bids(fleet.jobs[job], int(fleet.gpus[job]), float(fleet.submit[job]))
        for job, bids in self.jobs.items():
            bids.done = min(int(fleet.epoch[job] + 1e-9), bids.epochs)
        if new or gone:
            part = min(1.0, self.gpus / len(self.jobs))
            for bids in self.jobs.values():
                took = float(bids.epoch_s[: bids.done].sum()) + bids.left_s
                bids.fair.append((self.round, bids.submit_s + took / part))
        if new or gone or self.round % int(self.settings.again) == 0 or self.round not in self.plan:
            self.plan = self._plan()
        return [job for job in self.plan[self.round] if job in self.jobs]

    def _plan(self) -> dict[int, list[int]]:
        """Jobs by round for the whole window, GPUs left over to those with the most left to do."""
        names, bids = list(self.jobs), list(self.jobs.values())
        window = int(self.settings.window)
        left = np.array([each.left_s for each in bids])
        table = self._table(bids, left, None)
        self.plans += 1
        if table is None:
            self.unfair += 1
            table = self._table(bids, left, self._priorities(bids, left))
        if table is None:
            raise AssertionError("a plan without fairness always exists: nobody runs")
        longest = np.argsort(-left, kind="stable").tolist()
        plan: dict[int, list[int]] = {}
        for r in range(window):
            chosen = np.flatnonzero(table[:, r]).tolist()
            free = self.gpus - sum(bids[i].gpus for i in chosen)
            for i in longest:
                if not table[i, r] and bids[i].gpus <= free:
                    chosen.append(i)
                    free -= bids[i].gpus
            plan[self.round + r] = [names[i] for i in chosen]
        return plan

    def _priorities(self, bids: list[Bids], left: Float64) -> Float64:
        """(m,) how much louder a job's logarithm counts that would end later than is fair."""
        part = min(1.0, self.gpus / len(bids))
        fair = np.array([max(each.fair_finish(self.round), 1.0) for each in bids])  # s; one epoch at time 0 has 0
        ratio = (self.round_s * self.round + left / part) / fair
        power = np.where(left < self.round_s, 100.0, self.settings.power)
        late = ratio > self.settings.ratio
        loud = np.exp(np.minimum(power * np.log(np.maximum(ratio, 1e-9)), math.log(LOUDEST)))
        return np.where(late, loud, 1.0)

    def _table(self, bids: list[Bids], left: Float64, priority: Float64 | None) -> Any:
        """(m, window) bool: who runs in which round; None where no plan is fair to all (asked with `priority` None).

        Numbers of rounds that fit by their sum nearly always fit one by one; where not, rounds are told apart.
        """
        loud = np.ones(len(bids)) if priority is None else priority
        for apart in (False, True):
            counts = self._counts(bids, left, priority, apart)
            if counts is None:
                return None
            table = self._ranked(bids, counts, loud)
            if table is not None:
                return table
        raise AssertionError("rounds that fit one by one cannot be ranked")

    def _counts(self, bids: list[Bids], left: Float64, priority: Float64 | None, apart: bool) -> Int64 | None:
        """(m,) rounds of the window for each job; None where there is no plan.

        Columns: rounds n, epochs planned p, six weights of the logarithm per job, the longest remaining time, and
        (`apart`) whether each job runs in each round.
        """
        m, window = len(bids), int(self.settings.window)
        epochs = np.array([each.epochs for each in bids], float)
        done = np.array([each.done for each in bids], float)
        pace = np.array([each.pace_s for each in bids])
        gpus = np.array([each.gpus for each in bids], float)
        loud = np.ones(m) if priority is None else priority
        rows: list[tuple[list[int], list[float], float, float]] = [
            (list(range(m)), gpus.tolist(), -np.inf, float(self.gpus * window))
        ]
        longest = 8 * m
        fair_left = np.full(m, np.inf)
        if priority is None:
            part = min(1.0, self.gpus / m)
            fair = np.array([each.fair_finish(self.round) for each in bids])
            fair_left = (fair * self.settings.ratio - self.round_s * (self.round + window)) * part
            if (fair_left < 0).any():
                return None
        for i in range(m):
            logs = list(range(2 * m + 6 * i, 2 * m + 6 * i + 6))
            rows.append(([m + i, i], [pace[i], -self.round_s], -np.inf, 0.0))
            rows.append(([*logs, m + i], [*BASES, -1 / epochs[i]], done[i] / epochs[i], done[i] / epochs[i]))
            rows.append((logs, [1.0] * 6, 1.0, 1.0))
            rows.append(([longest, m + i], [1.0, pace[i]], left[i], np.inf))
            if np.isfinite(fair_left[i]):
                rows.append(([m + i], [pace[i]], left[i] - fair_left[i], np.inf))
        cells = 8 * m + 1 + np.arange(m * window if apart else 0).reshape(m, -1)
        for i, mine in enumerate(cells.tolist() if apart else ()):
            rows.append(([*mine, i], [1.0] * window + [-1.0], 0.0, 0.0))
        for each in cells.T.tolist():
            rows.append((each, gpus.tolist(), -np.inf, float(self.gpus)))
        cost = np.zeros(8 * m + 1 + cells.size)
        cost[2 * m : 8 * m] = -np.repeat(loud, 6) * np.tile(LOGS, m) / (m * window)
        cost[longest] = self.settings.k
        high = np.concatenate([np.full(m, window), np.full(m, np.inf), np.ones(6 * m), [np.inf], np.ones(cells.size)])
        whole = np.zeros(len(cost))
        whole[:m] = whole[8 * m + 1 :] = 1
        found = self._solve(cost / np.abs(cost).max(), rows, high, whole)
        return None if found is None else np.rint(found[:m]).astype(np.int64)

    def _ranked(self, bids: list[Bids], counts: Int64, priority: Float64) -> Any:
        """(m, window) bool: rounds of each job, smallest sum of priority x mean round; None: they do not fit."""
        window, m = int(self.settings.window), len(bids)
        table = np.zeros((m, window), bool)
        some = np.flatnonzero(counts > 0)
        if not len(some):
            return table
        rows: list[tuple[list[int], list[float], float, float]] = []
        for at, i in enumerate(some.tolist()):
            cells = list(range(at * window, (at + 1) * window))
            rows.append((cells, [1.0] * window, float(counts[i]), float(counts[i])))
        for r in range(window):
            cells = [at * window + r for at in range(len(some))]
            rows.append((cells, [float(bids[i].gpus) for i in some.tolist()], -np.inf, float(self.gpus)))
        weight = priority[some] / counts[some]
        cost = (weight[:, None] * np.arange(window)[None, :]).ravel()
        found = self._solve(cost / max(float(cost.max()), 1e-300), rows, np.ones(cost.shape), np.ones(cost.shape))
        if found is None:
            return None
        table[some] = found.reshape(len(some), window) > 0.5
        return table

    def _solve(
        self, cost: Float64, rows: list[tuple[list[int], list[float], float, float]], high: Float64, whole: Float64
    ) -> Float64 | None:
        """Cheapest x in [0, high], whole where `whole` is 1; None where there is none. ForetraceError out of time."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise MissingExtraError("its own policy needs scipy: pip install 'foretrace[fleet]'.") from None
        offsets = np.cumsum([0, *(len(row[0]) for row in rows)])
        columns = np.concatenate([row[0] for row in rows])
        values = np.concatenate([row[1] for row in rows])
        matrix = csr_array((values, columns, offsets), shape=(len(rows), len(cost)))
        bounds = LinearConstraint(matrix, [row[2] for row in rows], [row[3] for row in rows])
        found = milp(
            cost, constraints=bounds, bounds=Bounds(0, high), integrality=whole,
            options={"mip_rel_gap": self.settings.gap, "time_limit": self.settings.limit_s},
        )  # fmt: skip
        if found.x is None and found.status == 1:
            raise ForetraceError(
                f"the solver found no plan for round {self.round} in {self.settings.limit_s:g} s; set"
                " market_limit_s higher."
            )
        return None if found.x is None else np.asarray(found.x)
