"""What a step of synchronous training takes over rows of an embedding server, uncached and with look-ahead.

Every batch is played with the bytes that the plan of `training.rows.lookahead` gives each trainer, in the order in
which `training.rows.trainer` sends them: what the next batch needs at once, all else behind the computation and before
it is needed. A link carries `bytes_per_s` in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.training.rows.lookahead import LAG, LookAheadPlan
from foretrace.training.rows.server import CHUNK

NUMBER = 4  # bytes of a row's number and of a weight


@dataclass(frozen=True, kw_only=True)
class RowTraffic:
    """Bytes per batch and trainer (batches, trainers), as a trainer sends and gets them."""

    fetch_out: Float64
    fetch_in: Float64
    gradients_out: Float64  # needed at once; uncached: pushed to the server
    gradients_in: Float64
    values_out: Float64
    values_in: Float64
    later_out: Float64
    later_in: Float64
    back_out: Float64  # rows that go back to the server

    @property
    def now(self) -> Float64:
        """Bytes of the busier direction that a batch waits for."""
        out, into = self.gradients_out + self.values_out, self.gradients_in + self.values_in
        return np.maximum(out, into)

    @property
    def all(self) -> Float64:
        """Bytes of the busier direction."""
        out = self.gradients_out + self.values_out + self.later_out + self.fetch_out + self.back_out
        return np.maximum(out, self.gradients_in + self.values_in + self.later_in + self.fetch_in)


@dataclass(frozen=True, kw_only=True)
class RowStep:
    """What a step is made of: sizes, the link, and what the processor does meanwhile."""

    width: int
    state: int
    dense: int  # weights of the dense networks
    compute_s: float
    bytes_per_s: float
    latency_s: float = 0.0  # of a request or message
    burst_bytes: int = 0  # that a direction which was idle carries at once (the token bucket of a shaped link)
    host_s: float = 0.0  # of Python and NumPy per step that nothing overlaps
    least_s: float = 0.0  # that a step takes on any link


def traffic(plan: LookAheadPlan, step: RowStep, *, cached: bool) -> RowTraffic:
    """Return the bytes of a plan, of the uncached training with `cached` False."""
    batches, trainers = plan.end - plan.begin, plan.trainers
    row, gradient = NUMBER * (step.width + step.state), NUMBER * step.width
    dense = NUMBER * step.dense / trainers * (trainers - 1)
    found = {name: np.zeros((batches, trainers)) for name in RowTraffic.__dataclass_fields__}

    def count(parts: Iterable[Int64]) -> int:
        return sum(map(len, parts))

    for batch, trainer in product(range(batches), range(trainers)):
        now, later = (plan.turn(plan.begin + batch, trainer, soon=soon) for soon in (True, False))
        fetched, pushed = (len(now.fetch), 0) if cached else (len(now.ids), len(now.ids))
        moved = {
            "fetch_out": NUMBER * fetched, "fetch_in": row * fetched, "gradients_in": dense, "values_out": dense,
            "gradients_out": dense + (NUMBER + gradient) * pushed, "values_in": dense,
        }  # fmt: skip
        if cached:
            moved["gradients_out"] += gradient * count(now.gradients_to)
            moved["gradients_in"] += gradient * count(now.gradients_from)
            moved["values_out"] += row * count(now.values_to)
            moved["values_in"] += row * count(now.values_from)
            moved["later_out"] = gradient * count(later.gradients_to) + row * count(later.values_to)
            moved["later_in"] = gradient * count(later.gradients_from) + row * count(later.values_from)
            moved["back_out"] = (NUMBER + row) * len(later.write_back)
        for name, value in moved.items():
            found[name][batch, trainer] = value
    return RowTraffic(**found)


def uncached_s(moved: RowTraffic, step: RowStep) -> Float64:
    """Return seconds of every batch: fetch, compute, push and exchange, one after the other."""
    rate, latency = step.bytes_per_s, step.latency_s
    fetch = (moved.fetch_out + moved.fetch_in).max(1)
    fetch = np.maximum(fetch - step.burst_bytes, 0)
    push = np.maximum(np.maximum(moved.gradients_out, moved.gradients_in).max(1) - step.burst_bytes, 0)
    exchange = np.maximum(moved.values_out, moved.values_in).max(1)
    found: Float64 = (fetch + push + exchange) / rate + step.compute_s + step.host_s + 4 * latency
    return found


def cached_s(moved: RowTraffic, step: RowStep, *, ahead: int) -> Float64:
    """Return seconds of every batch; rows are fetched up to `ahead` batches before they are needed."""
    rate, batches = step.bytes_per_s, len(moved.later_out)
    soon = np.maximum(moved.gradients_out, moved.gradients_in).max(1)
    soon += np.maximum(moved.values_out, moved.values_in).max(1)
    busy_s = step.compute_s + step.host_s
    waiting: list[tuple[int, Float64]] = []  # which batch needs it; bytes (sent or received, trainers) in their order
    found, fetched = [], 0

    def add(needed: int, out: Float64, into: Float64) -> None:
        waiting.append((needed, np.stack([out, into])))

    def drain(seconds: float) -> None:
        """Move what waits for so long, what came first first, each direction by itself."""
        room = np.full((2, moved.later_out.shape[1]), seconds * rate)
        for number, (needed, left) in enumerate(waiting):
            took = np.minimum(left, room)
            waiting[number] = needed, left - took
            room -= took
        waiting[:] = [each for each in waiting if each[1].any()]

    def get(batch: int) -> float:
        """Move all that a batch needs; seconds that it takes."""
        due = sum((left for needed, left in waiting if needed <= batch), np.zeros(1))
        waiting[:] = [each for each in waiting if each[0] > batch]
        return float(due.max()) / rate

    for batch in range(batches):
        while fetched <= min(batch + ahead, batches - 1):
            add(fetched, moved.fetch_out[fetched], moved.fetch_in[fetched])
            fetched += 1
        late_s = get(batch)
        drain(busy_s)
        # What is under way goes first: a piece in this process and one in the kernel. An idle link has saved up.
        extra = 2 * CHUNK if waiting else -min(step.burst_bytes, float(soon[batch]) / 2)
        found.append(late_s + busy_s + (float(soon[batch]) + extra) / rate + 4 * step.latency_s)
        add(batch + LAG, moved.later_out[batch], moved.later_in[batch])
        add(batch + LAG + ahead, moved.back_out[batch], 0 * moved.back_out[batch])
    return np.array(found)


def bound_s(moved: RowTraffic, step: RowStep) -> float:
    """Return the least that a mean step can take: max(c + now / R, all / R), without a host or latencies."""
    now, every = float(moved.now.max(1).mean()), float(moved.all.max(1).mean())
    return max(step.compute_s + now / step.bytes_per_s, every / step.bytes_per_s)
