"""`simulate`: requests served by engines of large language models. `EngineRules` say how, `Served` what came of it.

`disaggregate` has prompts on some engines and decoding on others, as DistServe (Zhong et al., OSDI 2024) and Splitwise
(Patel et al., ISCA 2024): a request computes its prompt on an engine of the first pool, which gives the first token;
its keys and values go to an engine of the second pool, whose scheduler lets it in as any other. Each device of an
engine sends its own part, one request after the other; a transfer is not overlapped with the prompt, and does not slow
the engines down.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from foretrace import executor
from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.names import question
from foretrace.serving.llm import loop, scheduler
from foretrace.serving.llm.loop import ROUTERS
from foretrace.serving.llm.scheduler import POLICIES, PREEMPTIONS, EngineArrays
from foretrace.serving.llm.step_times import MIDDLE, StepTimes
from foretrace.serving.requests import Requests

_BUDGET = {"chunked": 2048}  # vLLM's default; of policies that take whole prompts:
_WHOLE_PROMPTS = 8192
_INTERVAL_S = 1e-3  # of samples at first; it doubles when they are full
_TOGETHER = 4  # groups of replicas for each core, so that the last one does not wait long
_FEW = 200_000  # requests that are simulated sooner than processes start


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """How an engine schedules, and what it does with memory. Defaults are vLLM's, whose names stand in brackets.

    Raises ForetraceError for a number or word that cannot be.
    """

    policy: str = "chunked"  # of POLICIES, see `scheduler`
    token_budget: int = 0  # tokens of a step (max_num_batched_tokens); 0: 2,048 for chunked, else 8,192
    sequences: int = 256  # that run at a time (max_num_seqs)
    block: int = 16  # tokens of a block of the cache (block_size)
    utilisation: float = 0.9  # share of the device's memory that the engine uses (gpu_memory_utilization)
    watermark: float = 0.01  # share of the blocks that stay free when a sequence is let in
    preemption: str = "recompute"  # or "swap" to host memory
    swap_bytes: float = 4 * 2**30  # of host memory, per device (swap_space)
    swap_bytes_per_s: float = 25e9  # between a device and host memory
    prefix_cache: bool = True  # keep blocks of prompts whose hashes the requests have (enable_prefix_caching)

    def __post_init__(self) -> None:
        """Check the words and numbers."""
        for name, known in (("policy", POLICIES), ("preemption", PREEMPTIONS)):
            check_word(name, getattr(self, name), known)
        for name, good, wanted in (
            ("token_budget", self.token_budget >= 0, "0 or more"),
            ("sequences", self.sequences >= 1, "1 or more"),
            ("block", self.block >= 1, "1 or more"),
            ("utilisation", 0 < self.utilisation <= 1, "above 0 and at most 1"),
            ("watermark", 0 <= self.watermark < 1, "from 0 to below 1"),
            ("swap_bytes", self.swap_bytes >= 0, "0 or more"),
            ("swap_bytes_per_s", self.swap_bytes_per_s > 0, "above 0"),
        ):
            if not good:
                raise ForetraceError(f"`{name}=` must be {wanted}, got {getattr(self, name):g}.")

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        return self.token_budget or _BUDGET.get(self.policy, _WHOLE_PROMPTS)

    def blocks(self, steps: StepTimes, longest: int) -> int:
        """Return blocks of the cache beside the largest step; `longest`: prompt that comes. Raises DoesNotFitError."""
        step = self.budget if self.policy == "chunked" else max(self.budget, longest)
        found = int(steps.capacity_tokens(self.utilisation, step) // self.block)
        if found < 1:
            raise DoesNotFitError(
                f"{steps.model or 'the model'} does not fit: {steps.weight_bytes / 1e9:.1f} GB of weights, "
                f"{steps.activation_bytes_per_token * step / 1e9:.1f} GB of activations and "
                f"{steps.buffer_bytes / 1e9:.1f} GB of buffers leave no room for keys and values in "
                f"{self.utilisation * steps.memory_bytes / 1e9:.1f} GB of {steps.device or 'the device'}"
            )
        return found


class DoesNotFitError(ForetraceError):
    """The weights leave no room for a cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What became of n requests, in their order. Times in seconds; NaN of requests that can never fit and were refused.

    Totals are those of all replicas.
    """

    arrival_s: Float64  # (n,) when each came
    first_s: Float64  # (n,) when its first token came out
    finish_s: Float64  # (n,) when its last one did
    prompt: Int64  # (n,) tokens
    output: Int64  # (n,) tokens
    preempted: Int64  # (n,) how often
    found: Int64  # (n,) tokens of its prompt in a prefix cache when it was let in first
    gaps: Int64  # (GAP_BINS,) times between tokens of a sequence, see `scheduler.gap_bin`
    over_time: Float64  # (SAMPLES, 3) used blocks, running and waiting sequences, times seconds, for each `interval_s`
    interval_s: float
    log: Any  # STEP records of the first replica, as many as were asked for
    replicas: int
    blocks: int  # of one replica
    seconds: float  # until the last step ended
    busy_s: float  # of the first pipeline stage
    used_s: float  # blocks in use times seconds
    kv_most: float  # largest share of the blocks of a replica in use
    steps: int
    preemptions: int
    computed: int  # tokens
    emitted: int  # tokens that came out
    hits: int  # tokens found in prefix caches, again after each preemption
    request_s: float = 0.0  # that each request takes beside the engines; its client sent it so long before it came


_COLUMNS = ("arrival_s", "first_s", "finish_s", "prompt", "output", "preempted", "found")
_COUNTED = ("steps", "preemptions", "computed", "emitted", "hits")


def check_word(name: str, word: str, known: Collection[str]) -> None:
    """Raise ForetraceError unless the word is known."""
    if word not in known:
        raise ForetraceError(f"`{name}={word}` does not exist; {question(word, known)}")


def simulate(
    requests: Requests, steps: StepTimes, rules: EngineRules | None = None, *, replicas: int = 1,
    router: str = "round-robin", end: int = MIDDLE, log: int = 0, begun_s: Float64 | None = None, on: str = "here",
) -> Served:  # fmt: skip
    """Serve requests with so many equal engines.

    Args:
        requests: an open loop, or a closed one, whose clients are shared out over the replicas.
        steps: times and memory of one engine.
        rules: its scheduler's.
        replicas: engines; under round robin they are independent and run on all cores, or on Ray.
        router: of ROUTERS.
        end: of the range of step times, MIDDLE, LOW or HIGH.
        log: steps of the first replica to keep.
        begun_s: (n,) of requests whose first token has come out elsewhere, and whose keys and values arrive with
            them: when that was. They must want two tokens or more.
        on: see `executor`.

    Raises:
        DoesNotFitError: no room for a cache.
        ForetraceError: replicas or router cannot be, or a request needs more than the whole cache of every engine.

    """
    rules = rules or EngineRules()
    check_word("router", router, ROUTERS)
    if replicas < 1:
        raise ForetraceError(f"`replicas=` must be 1 or more, got {replicas}.")
    blocks = rules.blocks(steps, int(requests.prompt.max()))
    if requests.concurrency and router != "round-robin":
        raise ForetraceError(f"`router={router}` needs open arrivals; clients of a closed loop keep their replica.")
    engines = min(replicas, requests.concurrency or len(requests))  # others would stay idle
    groups = 1
    alone = router == "round-robin" and not steps.accepted  # what is accepted is drawn by request
    if alone and (len(requests) > _FEW or on == "ray"):
        groups = min(engines, _TOGETHER * executor.cores())
    group = np.arange(len(requests)) % engines % groups
    rows = [np.flatnonzero(group == g) for g in range(groups)]
    play = partial(_played, steps=steps, rules=rules, blocks=blocks, router=router, end=end)
    parts = [
        partial(
            play, requests.take(mine) if groups > 1 else requests, engines=len(range(g, engines, groups)),
            first=int((mine < (requests.concurrency or len(requests))).sum()),
            begun_s=None if begun_s is None else begun_s[mine], log=log if g == 0 else 0,
        )
        for g, mine in enumerate(rows)
    ]  # fmt: skip
    return merged(executor.map(_called, parts, on=on, pool=groups > 1), rows, replicas)


def _called(part: Callable[[], Served]) -> Served:
    return part()


def engine_arrays(
    requests: Requests, rules: EngineRules, blocks: int, steps: StepTimes | None = None, *, engines: int = 1,
    end: int = MIDDLE, log: int = 0,
) -> EngineArrays:  # fmt: skip
    """Return what the scheduler knows at first; each array of engines has a leading dimension of `engines`.

    For one engine that runs for real, take `one_engine` of it; it has no `steps`. Raises ForetraceError where hashes do
    not fit blocks.
    """
    n, stages, accepted = len(requests), steps.stages if steps else 1, steps.accepted if steps else ()
    e = np.zeros(engines, scheduler.ENGINE).view(np.recarray)
    e.prompts_first, e.pieces, e.reserves, e.closed = POLICIES[rules.policy]
    e.budget, e.slots, e.batch = rules.budget, rules.sequences, -(-rules.sequences // stages)
    e.block, e.total, e.free, e.watermark = rules.block, blocks, blocks, int(rules.watermark * blocks)
    e.swaps, e.proposals, e.stages, e.end, e.stuck = rules.preemption == "swap", len(accepted), stages, end, 1
    if steps:
        e.swap = int(rules.swap_bytes // (steps.kv_bytes_per_token * rules.block))
        e.swap_s = steps.kv_bytes_per_token / rules.swap_bytes_per_s
        e.send_s, e.send_per_token_s, e.request_s = steps.send_s, steps.send_per_token_s, steps.request_s
    seqs = np.zeros(n, scheduler.SEQUENCE).view(np.recarray)
    seqs.prompt, seqs.output, seqs.arrival = requests.prompt, requests.output, requests.arrival_s
    seqs.first = seqs.finish = np.nan
    hashes, distinct = np.zeros(0, np.int64), 0
    if rules.prefix_cache and len(requests.hashes):
        if requests.hash_tokens % rules.block:
            raise ForetraceError(f"`block={rules.block}` must divide the {requests.hash_tokens} tokens of a hash.")
        e.share = requests.hash_tokens // rules.block
        known, hashes = np.unique(requests.hashes, return_inverse=True)
        distinct = len(known)
        seqs.hash_at = requests.hash_first[:-1]
        seqs.hash_n = np.minimum(np.diff(requests.hash_first), requests.prompt // requests.hash_tokens)
    entries = np.zeros((engines, distinct + 1), scheduler.ENTRY).view(np.recarray)
    entries["older"][:, -1] = entries["newer"][:, -1] = distinct
    samples = np.zeros((loop.SAMPLES + 1, 3))
    samples[-1, 0] = _INTERVAL_S
    return EngineArrays(
        e=e, seqs=seqs, running=np.zeros((engines, rules.sequences), np.int64), entries=entries,
        hashes=hashes.astype(np.int64), gaps=np.zeros(scheduler.GAP_BINS, np.int64),
        accepted=np.array(accepted, np.float64), ends=np.zeros((engines, stages)),
        numbers=np.zeros((engines, stages), np.int64), stage_free=np.zeros((engines, stages)),
        residue=np.zeros(rules.block, np.int64), samples=samples,
        log=np.zeros((engines, log), loop.STEP).view(np.recarray),
    )  # fmt: skip


def _played(
    requests: Requests, *, engines: int, first: int, steps: StepTimes, rules: EngineRules, blocks: int, router: str,
    end: int, begun_s: Float64 | None, log: int,
) -> Served:  # fmt: skip
    """Simulate engines together; `first` requests come by themselves."""
    states = engine_arrays(requests, rules, blocks, steps, engines=engines, end=end, log=log)
    e, seqs = states.e, states.seqs
    if begun_s is not None:
        seqs.computed, seqs.generated, seqs.first, seqs.last = seqs.prompt, 1, begun_s, begun_s
    fits = blocks - -(-(requests.prompt + requests.output - 1) // rules.block) >= e.watermark[0]
    first = min(first, int(fits.sum()))
    e.following, e.stride = first + (np.arange(engines) - first) % engines, engines
    e.coming = e.following
    if requests.concurrency:
        seqs.arrival += steps.request_s  # its clients send at 0
    loop.play(states, steps.table, np.flatnonzero(fits), first, ROUTERS.index(router))
    counted: dict[str, Any] = {name: int(e[name].sum()) for name in _COUNTED}
    return Served(
        arrival_s=seqs.arrival, first_s=seqs.first, finish_s=seqs.finish, prompt=requests.prompt,
        output=requests.output, preempted=seqs.preempted, found=seqs.found, gaps=states.gaps,
        over_time=states.samples[:-1], interval_s=float(states.samples[-1, 0]), log=states.log[0, : e.rows[0]],
        replicas=engines, blocks=blocks, seconds=float(e.now.max()), busy_s=float(e.busy.sum()),
        used_s=float(e.area.sum()), kv_most=float(e.most_used.max()) / blocks, request_s=steps.request_s, **counted,
    )  # fmt: skip


def merged(parts: Sequence[Served], rows: Sequence[Int64], replicas: int) -> Served:
    """Return one answer about all replicas; `rows` are the requests of each part."""
    order = np.argsort(np.concatenate(rows), kind="stable")
    found: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in parts])[order] for name in _COLUMNS
    } | {name: sum(getattr(each, name) for each in parts) for name in ("gaps", "busy_s", "used_s", *_COUNTED)}
    interval = max(each.interval_s for each in parts)
    over_time = np.zeros((loop.SAMPLES, 3))
    for each in parts:
        pieces = min(round(interval / each.interval_s), loop.SAMPLES)  # of engines that idle all the time
        over_time[: loop.SAMPLES // pieces] += each.over_time.reshape(-1, pieces, 3).sum(1)
    return replace(
        parts[0], **found, over_time=over_time, interval_s=interval, replicas=replicas,
        seconds=max(each.seconds for each in parts), kv_most=max(each.kv_most for each in parts),
    )  # fmt: skip


# --- pools apart -----------------------------------------------------------------------------------------------------


def disaggregate(
    requests: Requests, steps: StepTimes, rules: EngineRules | None = None, *, prefill: int, decode: int,
    router: str = "round-robin", end: int = MIDDLE, on: str = "here",
) -> Served:  # fmt: skip
    """Serve requests with so many engines for prompts and so many for decoding; else as `simulate`.

    Raises:
        ForetraceError: as `simulate`, a pool is empty, the loop is closed, or nobody knows how fast caches travel.

    """
    if min(prefill, decode) < 1:
        raise ForetraceError(f"each pool must have an engine, got `prefill={prefill}` and `decode={decode}`.")
    if requests.concurrency:
        raise ForetraceError("prompts and decoding on engines of their own need open arrivals, not a closed loop.")
    if not steps.transfer_bytes_per_s > 0:
        raise ForetraceError(
            f"`transfer_bytes_per_s=` must be above 0 to send caches, got {steps.transfer_bytes_per_s}."
        )
    asked = replace(requests, output=np.ones_like(requests.output))
    first = simulate(asked, steps, rules, replicas=prefill, router=router, end=end, on=on)
    more = np.flatnonzero((requests.output > 1) & ~np.isnan(first.first_s))
    if not len(more):
        return replace(first, output=requests.output, replicas=prefill + decode)
    arrival = requests.arrival_s.copy()
    arrival[more] = _sent(first.first_s[more], requests.prompt[more], more % prefill, steps)
    more = more[np.argsort(arrival[more], kind="stable")]
    bare = replace(requests, arrival_s=arrival, hash_first=0 * requests.hash_first, hashes=requests.hashes[:0])
    second = simulate(
        bare.take(more), steps, rules, replicas=decode, end=end, begun_s=first.first_s[more], on=on,
        router="round-robin" if router == "prefix-aware" else router,
    )  # fmt: skip
    finish, preempted = np.where(requests.output > 1, np.nan, first.finish_s), first.preempted.copy()
    finish[more] = second.finish_s
    preempted[more] += second.preempted
    both = merged([first, second], [np.arange(len(requests)), more], prefill + decode)
    return replace(
        both, arrival_s=requests.arrival_s, first_s=first.first_s, finish_s=finish, prompt=requests.prompt,
        output=requests.output, preempted=preempted, found=first.found,
    )  # fmt: skip


def _sent(ready_s: Float64, prompt: Int64, engine: Int64, steps: StepTimes) -> Float64:
    """Return when keys and values have arrived that were ready then; each engine sends one after the other.

    `engine` is whose they are: as round robin shares requests out, also where another router did.
    """
    takes = prompt * steps.kv_bytes_per_token / steps.transfer_bytes_per_s
    arrived = np.empty(len(ready_s))
    for each in np.unique(engine):
        rows = np.flatnonzero(engine == each)
        rows = rows[np.argsort(ready_s[rows], kind="stable")]
        work = np.cumsum(takes[rows])
        arrived[rows] = work + np.maximum.accumulate(ready_s[rows] - (work - takes[rows]))
    return arrived
