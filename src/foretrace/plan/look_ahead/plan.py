"""`plan_cache`: the step of a training over an embedding server, uncached and with look-ahead, each with its range.

Every batch is played with the bytes that the plan of `training.rows.lookahead` gives each trainer, in the order in
which `training.rows.trainer` sends them: what the next batch needs at once, all else behind the computation and before
it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import ForetraceError
from foretrace.experiment.statistics import Ratio
from foretrace.hardware.cluster import parse_link
from foretrace.names import numbers
from foretrace.training.rows.lookahead import LAG, LookAheadPlan, plan_ahead
from foretrace.training.rows.lookups import EmbeddingTable, Lookups, parse_reuse, read
from foretrace.training.rows.optimizers import row_optimizer
from foretrace.training.rows.server import CHUNK
from foretrace.training.rows.trainer import FETCHED_AHEAD

if TYPE_CHECKING:
    from torch import Tensor, nn


Range = tuple[float, float, float]  # value, low, high
Corner = tuple[int, ...]  # which value of the ranges of a rate, of passes and of a host
NUMBER = 4  # bytes of a row's number and of a weight
CORNERS: tuple[Corner, ...] = ((0, 0, 0), *product((1, 2), repeat=3))

# What is not known before anything is measured.
PAYLOAD: Range = (0.955, 0.90, 0.97)  # of a shaped link's rate (Ethernet and TCP headers; measured 0.94 to 0.955)
HOST_S_PER_BYTE: Range = (10e-9, 0.0, 30e-9)  # of Python, NumPy and the kernel that nothing overlaps
COMPUTE_S: Range = (0.040, 0.020, 0.080)
MOST_COMPUTE_S = 60.0
LAYERS = (32,)  # hidden, of the dense networks
OTHERS = (4, 16, 64)  # batches that are looked ahead in comparison


@dataclass(frozen=True, kw_only=True)
class CacheQuestion:
    """A training over rows: `trainers` on links to the server and each other."""

    source: str
    lookups: Lookups
    trainers: int
    link: str
    look_ahead: int
    optimizer: str = "sgd"
    compute_s: float | None = None  # of a batch; None where it is not known
    width: int = 32  # numbers in a row

    def __post_init__(self) -> None:
        row_optimizer(self.optimizer)
        if self.width < 1:
            raise ForetraceError(f"`width=` must be 1 or more, got {self.width}.")
        if self.compute_s is not None and not 0 <= self.compute_s < MOST_COMPUTE_S:
            raise ForetraceError(
                f"The passes of a batch must take 0 to {MOST_COMPUTE_S:g} s, got {self.compute_s:g}; change "
                "`compute_ms=`."
            )

    @property
    def dense(self) -> int:
        """Weights of the dense networks (DLRM's, with LAYERS)."""
        vectors, hidden = len(self.lookups.tables) + 1, LAYERS[0]
        bottom = 13 * hidden + hidden + hidden * self.width + self.width
        return bottom + (self.width + vectors * (vectors - 1) // 2) * hidden + hidden + hidden + 1


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a step depends on beside its bytes; what was not measured has a wide range."""

    bytes_per_s: Range  # of a link, in each direction
    host_s: dict[bool, Range]  # of Python and NumPy that nothing overlaps, by whether it looks ahead
    compute_s: Range
    free_s: Range = (0.0, 0.0, 0.0)  # of a step that looks ahead over links without a limit: it cannot be shorter
    latency_s: float = 0.0  # of a request or message
    burst_bytes: int = 0  # that a direction which was idle carries at once (the token bucket of a shaped link)


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Seconds of a mean step with its range."""

    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, kw_only=True)
class LookedAhead:
    """What one look-ahead comes to. Bytes are of a trainer's busier direction and a mean batch."""

    look_ahead: int
    step: PredictedStep
    speedup: Ratio  # uncached over this step
    hit_rate: float  # of the different rows of a batch
    now_bytes: float  # that the next batch waits for
    later_bytes: float  # behind the computation
    fetched_bytes: float  # of these, ahead of their batch
    all_bytes: float
    bound_s: float  # max(compute + now / rate, all / rate)
    held_rows: int  # of a trainer, at most
    held_bytes: int


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The answer; batches from `warm` on count, before them caches fill."""

    question: CacheQuestion
    batches: int
    warm: int
    uncached: PredictedStep
    uncached_bytes: float
    chosen: LookedAhead
    others: tuple[LookedAhead, ...]
    notes: tuple[str, ...]


def plan_cache(
    question: CacheQuestion, conditions: Conditions | None = None, *, batches: int = 0, alone: bool = False
) -> CachePlan:
    """Predict the first `batches` of a trace, by default all; `alone` without other look-aheads.

    Raises ForetraceError for a trace, trainers or a look-ahead that cannot be.
    """
    batches = batches or question.lookups.batches
    if batches < 4:
        raise ForetraceError(f"A trace must have 4 batches or more, got {batches}; lower its samples of a batch.")
    warm = min(question.look_ahead, batches // 2)
    row = NUMBER * (question.width + row_optimizer(question.optimizer).state)
    sizes = {"row": row, "gradient": NUMBER * question.width, "dense": NUMBER * question.dense}
    found = {}
    for look_ahead in sorted({question.look_ahead, *(() if alone else OTHERS)}):
        plan = plan_ahead(question.lookups, trainers=question.trainers, look_ahead=look_ahead, end=batches)
        found[look_ahead] = plan, traffic(plan, **sizes, cached=True)
    plain = traffic(found[question.look_ahead][0], **sizes, cached=False)
    moved = float(plain.all[warm:].max(1).mean())
    if conditions is None:
        conditions = _unmeasured(question, moved)
    without = [float(uncached_s(plain, conditions, corner)[warm:].mean()) for corner in CORNERS]
    looked = tuple(_looked(*each, without, conditions, warm, row) for each in found.values())
    chosen = next(each for each in looked if each.look_ahead == question.look_ahead)
    return CachePlan(
        question=question, batches=batches, warm=warm, uncached=_ranged(without),
        uncached_bytes=moved, chosen=chosen, others=tuple(each for each in looked if each is not chosen),
        notes=tuple(_notes(question, warm)),
    )  # fmt: skip


def _looked(
    plan: LookAheadPlan, moved: RowTraffic, without: list[float], conditions: Conditions, warm: int, row: int
) -> LookedAhead:
    ahead = min(plan.look_ahead, FETCHED_AHEAD)
    steps = [
        max(float(cached_s(moved, conditions, corner, ahead=ahead)[warm:].mean()), conditions.free_s[corner[2]])
        for corner in CORNERS
    ]
    ratios = [before / after for before, after in zip(without, steps, strict=True)]

    def mean(busier: Float64) -> float:
        return float(busier[warm:].max(1).mean())

    now, every = mean(moved.now), mean(moved.all)
    rate, compute_s = conditions.bytes_per_s[0], conditions.compute_s[0]
    return LookedAhead(
        look_ahead=plan.look_ahead, step=_ranged(steps),
        speedup=Ratio(value=ratios[0], low=min(ratios), high=max(ratios)),
        hit_rate=float(plan.hit[plan.starts[warm] :].mean()), now_bytes=now,
        later_bytes=mean(busier(moved.later + moved.back)),
        fetched_bytes=mean(moved.fetch[1]), all_bytes=every, bound_s=max(compute_s + now / rate, every / rate),
        held_rows=int(plan.held.max()), held_bytes=int(plan.held.max()) * row,
    )  # fmt: skip


def _unmeasured(question: CacheQuestion, moved: float) -> Conditions:
    """Return what is known of a link's rate alone; `moved` bytes of an uncached step."""
    rate = parse_link(question.link).bytes_per_s
    value, low, high = (2 * moved * each for each in HOST_S_PER_BYTE)
    compute: Range = COMPUTE_S if question.compute_s is None else (question.compute_s,) * 3
    return Conditions(
        bytes_per_s=(rate * PAYLOAD[0], rate * PAYLOAD[1], rate * PAYLOAD[2]),
        host_s={False: (value, low, high), True: (value / 2, low, high)},
        compute_s=compute, latency_s=parse_link(question.link).latency_s,
    )  # fmt: skip


def _ranged(steps: list[float]) -> PredictedStep:
    return PredictedStep(step_s=steps[0], low_s=min(steps), high_s=max(steps))


def _notes(question: CacheQuestion, warm: int) -> Iterator[str]:
    if question.compute_s is None:
        yield (
            f"How long the passes of a batch take was not given: {1e3 * COMPUTE_S[0]:g} ms ({1e3 * COMPUTE_S[1]:g} – "
            f"{1e3 * COMPUTE_S[2]:g}) is assumed; say how long, and ranges are narrower."
        )
    if warm < question.look_ahead:
        yield (
            f"The trace is short for a look-ahead of {question.look_ahead}: only batches from {warm} on count, and "
            "their caches are not yet full."
        )


@dataclass(frozen=True, kw_only=True)
class RowTraffic:
    """Bytes by direction, batch and trainer (2, batches, trainers): what a trainer sends, and what it gets."""

    fetch: Float64
    gradients: Float64  # needed at once; uncached: pushed to the server
    values: Float64
    later: Float64
    back: Float64  # rows that go back to the server

    @property
    def now(self) -> Float64:
        """Bytes of the busier direction that a batch waits for."""
        return busier(self.gradients + self.values)

    @property
    def all(self) -> Float64:
        """Bytes of the busier direction."""
        return busier(self.gradients + self.values + self.later + self.fetch + self.back)


def busier(moved: Float64) -> Float64:
    """Return bytes of the busier direction: (batches, trainers)."""
    return np.asarray(moved.max(0), np.float64)


def traffic(plan: LookAheadPlan, *, row: int, gradient: int, dense: int, cached: bool) -> RowTraffic:
    """Return the bytes of a plan, of the uncached training with `cached` False.

    `row`, `gradient` and `dense` are bytes of a row with its state, of its gradient, and of the dense networks.
    """
    trainers, users, after = plan.trainers, plan.users, plan.next_users
    mine, soon = plan.owner[:, None] == np.arange(trainers), plan.soon[:, None]

    def counted(*entries: Int64 | Mask) -> Float64:
        """Return sums over the entries of every batch, by direction: (2, batches, trainers)."""
        sums = np.concatenate([np.zeros((len(entries), 1, trainers)), np.cumsum(entries, axis=1)], axis=1)
        return np.diff(sums[:, plan.starts], axis=1)

    shares, nothing = dense / trainers * (trainers - 1), np.zeros_like(users)
    asked = np.array([NUMBER, row])[:, None, None]  # a row's number for a row
    if not cached:
        reads = counted(users, users)
        none, pushed = np.zeros_like(reads), (NUMBER + gradient) * counted(users, nothing)
        return RowTraffic(fetch=asked * reads, gradients=shares + pushed, values=shares + none, later=none, back=none)
    fetched, back = users & ~plan.hit[:, None], mine & ~after.any(1, keepdims=True)
    given, taken = users & ~mine, mine * (users.sum(1, keepdims=True) - 1)  # gradients to and from others
    sent, got = mine * (after.sum(1, keepdims=True) - after), after & ~mine  # values
    return RowTraffic(
        fetch=asked * counted(fetched, fetched), gradients=shares + gradient * counted(given * soon, taken * soon),
        values=shares + row * counted(sent * soon, got * soon), back=(NUMBER + row) * counted(back, nothing),
        later=gradient * counted(given * ~soon, taken * ~soon) + row * counted(sent * ~soon, got * ~soon),
    )  # fmt: skip


def uncached_s(moved: RowTraffic, conditions: Conditions, corner: Corner = (0, 0, 0)) -> Float64:
    """Return seconds of every batch: fetch, compute, push and exchange, one after the other."""
    rate, compute_s, host_s = _at(conditions, corner, cached=False)
    fetch = np.maximum(moved.fetch.sum(0).max(1) - conditions.burst_bytes, 0)
    push = np.maximum(moved.gradients.max((0, 2)) - conditions.burst_bytes, 0)
    moving = fetch + push + moved.values.max((0, 2))
    return np.asarray(moving / rate + compute_s + host_s + 4 * conditions.latency_s, np.float64)


def _at(conditions: Conditions, corner: Corner, *, cached: bool) -> tuple[float, float, float]:
    """Return rate, passes and host at a corner."""
    rate, compute, host = corner
    return conditions.bytes_per_s[rate], conditions.compute_s[compute], conditions.host_s[cached][host]


def cached_s(moved: RowTraffic, conditions: Conditions, corner: Corner = (0, 0, 0), *, ahead: int) -> Float64:
    """Return seconds of every batch; rows are fetched up to `ahead` batches before they are needed."""
    (rate, *both_s), batches = _at(conditions, corner, cached=True), moved.later.shape[1]
    soon = moved.gradients.max((0, 2)) + moved.values.max((0, 2))
    busy_s = sum(both_s)
    waiting: list[tuple[int, Float64]] = []  # which batch needs it; bytes (sent or received, trainers) in their order
    found, fetched = [], 0

    def drain(seconds: float) -> None:
        """Move what waits for so long, what came first first, each direction by itself."""
        room = np.full_like(moved.later[:, 0], seconds * rate)
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
            waiting.append((fetched, moved.fetch[:, fetched]))
            fetched += 1
        late_s = get(batch)
        drain(busy_s)
        # What is under way goes first: a piece in this process and one in the kernel. An idle link has saved up.
        extra = 2 * CHUNK if waiting else -min(conditions.burst_bytes, float(soon[batch]) / 2)
        found.append(late_s + busy_s + (float(soon[batch]) + extra) / rate + 4 * conditions.latency_s)
        waiting += [(batch + LAG, moved.later[:, batch]), (batch + LAG + ahead, moved.back[:, batch])]
    return np.array(found)


def trace(text: str) -> Lookups:
    """Return lookups of `zipf:`, `reuse:`, `recorded:` or a file, NPZ or Parquet. Raises ForetraceError."""
    kind, colon, rest = text.partition(":")
    if colon and kind == "reuse":
        return parse_reuse(rest)
    return recorded(rest) if colon and kind == "recorded" else read(text)


def recorded(text: str) -> Lookups:
    """Record, for `dlrm size=tiny batches=32`, what each embedding of a zoo model or script reads of its loader's
    batches.

    Raises ForetraceError where the model has no embeddings, or its batches differ in size.
    """
    import torch

    from foretrace.zoo.registry import job

    name, *words = text.split() or [""]
    size = next((each for each in words if each.startswith("size=")), "size=tiny")
    batches = numbers([each for each in words if each != size], {"batches": 32}, "recorded")["batches"]
    training = job(name, size.removeprefix("size="))()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = {key: each for key, each in training.model.named_modules() if isinstance(each, kinds)}
    if not modules or batches < 1:
        raise ForetraceError(
            f"`recorded:{name}` must have embedding tables and a batch or more, got {len(modules)} tables and "
            f"{batches} batches; choose dlrm or ncf, and batches=1 or more."
        )
    seen: dict[str, list[Int64]] = {key: [] for key in modules}

    def keep(key: str) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[key].append(inputs[0].detach().numpy().ravel().astype(np.int64))

        modules[key].register_forward_pre_hook(hook)

    for key in modules:
        keep(key)
    with torch.no_grad():
        for _, batch in zip(range(batches), training.batches(), strict=False):
            training.forward(batch)
    samples, tables = training.batch_size, []
    for key, parts in seen.items():
        ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
        pooling, rest = divmod(len(ids), samples * batches)
        if rest or not pooling or len({len(each) for each in parts}) > 1:
            raise ForetraceError(f"{name} must read as many ids of {key} for every sample of a batch.")
        tables.append(EmbeddingTable.of(key, modules[key].num_embeddings, ids, pooling))
    return Lookups(tables=tuple(tables), samples=samples)
