"""`simulate`: requests served by engines of large language models. `EngineRules` say how, `Served` what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace import executor
from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.names import question
from foretrace.serving.llm import loop, scheduler
from foretrace.serving.llm.pace import MIDDLE
from foretrace.serving.llm.scheduler import EngineArrays
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests

POLICIES = {
    "prefill-first": scheduler.PREFILL_FIRST, "chunked": scheduler.CHUNKED, "orca": scheduler.ORCA,
    "static": scheduler.STATIC,
}  # fmt: skip
ROUTERS = {
    "round-robin": loop.ROUND_ROBIN, "least-outstanding": loop.LEAST_OUTSTANDING, "prefix-aware": loop.PREFIX_AWARE,
}  # fmt: skip
PREEMPTIONS = {"recompute": scheduler.RECOMPUTE, "swap": scheduler.SWAP}
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
        check_word("policy", self.policy, POLICIES)
        check_word("preemption", self.preemption, PREEMPTIONS)
        for name, least in (("token_budget", 0), ("sequences", 1), ("block", 1)):
            if getattr(self, name) < least:
                raise ForetraceError(f"`{name}=` must be {least} or more, got {getattr(self, name)}.")
        for name, good, wanted in (
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
        """Return blocks of the cache beside the largest step; `longest`: prompt that comes. Raises ForetraceError if
        none.
        """
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
    hits: int  # tokens found in prefix caches
    request_s: float = 0.0  # that each request takes beside the engines; in the latencies, in no other figure


def check_word(name: str, word: str, known: dict[str, int]) -> None:
    """Raise ForetraceError unless the word is known."""
    if word not in known:
        raise ForetraceError(f"`{name}={word}` does not exist; {question(word, known)}")


def simulate(
    requests: Requests,
    steps: StepTimes,
    rules: EngineRules | None = None,
    *,
    replicas: int = 1,
    router: str = "round-robin",
    end: int = MIDDLE,
    log: int = 0,
    begun_s: Float64 | None = None,
    on: str = "here",
) -> Served:
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
    alone = ROUTERS[router] == loop.ROUND_ROBIN and not steps.accepted  # what is accepted is drawn by request
    if alone and (len(requests) > _FEW or on == "ray"):
        groups = min(engines, _TOGETHER * executor.cores())
    group = np.arange(len(requests)) % engines % groups
    rows = [np.flatnonzero(group == g) for g in range(groups)]
    parts = [
        _Part(
            requests=requests.take(mine) if groups > 1 else requests,
            first=int((mine < (requests.concurrency or len(requests))).sum()),
            engines=len(range(g, engines, groups)),
            steps=steps, rules=rules, blocks=blocks, router=ROUTERS[router], end=end,
            begun_s=None if begun_s is None else begun_s[mine],
            log=log if g == 0 else 0,
        )
        for g, mine in enumerate(rows)
    ]  # fmt: skip
    found = executor.map(_play, parts, on=on, pool=groups > 1)
    return merged(found, rows, replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Engines that are simulated together."""

    requests: Requests
    first: int  # requests that come by themselves
    engines: int
    steps: StepTimes
    rules: EngineRules
    blocks: int
    router: int
    end: int
    begun_s: Float64 | None
    log: int


def engine_arrays(
    requests: Requests, rules: EngineRules, blocks: int, engines: int = 1, accepted: Sequence[float] = ()
) -> EngineArrays:
    """Return what the scheduler knows at first; each array of engines has a leading dimension of `engines`.

    `accepted` is as in `StepTimes`.
    For one engine that runs for real, take `one_engine` of it. Raises ForetraceError where hashes do not fit blocks.
    """
    n = len(requests)
    e = np.zeros(engines, scheduler.ENGINE).view(np.recarray)
    e.policy, e.budget, e.slots, e.batch = POLICIES[rules.policy], rules.budget, rules.sequences, rules.sequences
    e.block, e.total, e.free, e.watermark = rules.block, blocks, blocks, int(rules.watermark * blocks)
    e.preemption, e.head, e.tail = PREEMPTIONS[rules.preemption], scheduler.NOBODY, scheduler.NOBODY
    e.oldest = e.newest = scheduler.NOBODY
    e.proposals = len(accepted)
    seqs = np.zeros(n, scheduler.SEQUENCE).view(np.recarray)
    seqs.prompt, seqs.output, seqs.arrival, seqs.nxt = requests.prompt, requests.output, requests.arrival_s, -1
    seqs.first, seqs.finish = np.nan, np.nan
    hashes, distinct = np.zeros(0, np.int64), 0
    if rules.prefix_cache and len(requests.hashes):
        if requests.hash_tokens % rules.block:
            raise ForetraceError(f"`block={rules.block}` must divide the {requests.hash_tokens} tokens of a hash.")
        e.share = requests.hash_tokens // rules.block
        known, hashes = np.unique(requests.hashes, return_inverse=True)
        distinct = len(known)
        seqs.hash_at = requests.hash_first[:-1]
        seqs.hash_n = np.minimum(np.diff(requests.hash_first), requests.prompt // requests.hash_tokens)
    return EngineArrays(
        e=e, seqs=seqs, running=np.zeros((engines, rules.sequences), np.int64),
        entries=np.zeros((engines, distinct), scheduler.ENTRY).view(np.recarray), hashes=hashes.astype(np.int64),
        gaps=np.zeros(scheduler.GAP_BINS, np.int64), accepted=np.array(accepted, np.float64),
    )  # fmt: skip


def _play(part: _Part) -> Served:
    """Simulate the engines of a part."""
    requests, rules, steps, engines = part.requests, part.rules, part.steps, part.engines
    states = engine_arrays(requests, rules, part.blocks, engines, steps.accepted)
    e, seqs = states.e, states.seqs
    e.batch = -(-rules.sequences // steps.stages)
    e.swap = int(rules.swap_bytes // (steps.kv_bytes_per_token * rules.block))
    if part.begun_s is not None:
        seqs.computed, seqs.generated, seqs.first, seqs.last = seqs.prompt, 1, part.begun_s, part.begun_s
    need = -(-(requests.prompt + requests.output - 1) // rules.block)
    fits = part.blocks - need >= e.watermark[0]
    seqs.status[~fits] = scheduler.REFUSED
    first = min(part.first, int(fits.sum()))
    e.following, e.stride = first + (np.arange(engines) - first) % engines, engines
    r = np.zeros(engines, loop.RUN).view(np.recarray)
    r.stages, r.stuck, r.end, r.send, r.send_per_token = steps.stages, 1, part.end, steps.send_s, steps.send_per_token_s
    r.swap = steps.kv_bytes_per_token / rules.swap_bytes_per_s
    samples = np.zeros((loop.SAMPLES + 1, 3))
    samples[-1, 0] = _INTERVAL_S
    runs = loop.RunArrays(
        r=r, ends=np.zeros((engines, steps.stages)), numbers=np.zeros((engines, steps.stages), np.int64),
        stage_free=np.zeros((engines, steps.stages)), residue=np.zeros(rules.block, np.int64), samples=samples,
        log=np.zeros((engines, part.log), loop.STEP).view(np.recarray),
    )  # fmt: skip
    loop.play(states, runs, steps.table, np.flatnonzero(fits), first, part.router)
    seconds = float(r.now.max())
    return Served(
        arrival_s=seqs.arrival, first_s=seqs.first, finish_s=seqs.finish, prompt=requests.prompt,
        output=requests.output, preempted=seqs.preempted, gaps=states.gaps, over_time=samples[:-1],
        interval_s=float(samples[-1, 0]), log=runs.log[0, : r.rows[0]], replicas=engines, blocks=part.blocks,
        seconds=seconds, busy_s=float(r.busy.sum()), used_s=float(r.area.sum()),
        kv_most=float(r.most_used.max()) / part.blocks,
        steps=int(r.steps.sum()), preemptions=int(e.preemptions.sum()), computed=int(e.computed.sum()),
        emitted=int(e.emitted.sum()), hits=int(e.hits.sum()), request_s=steps.request_s,
    )  # fmt: skip


def merged(parts: Sequence[Served], rows: Sequence[Int64], replicas: int) -> Served:
    """Return one answer about all replicas; `rows` are the requests of each part."""
    order = np.argsort(np.concatenate(rows), kind="stable")
    interval = max(each.interval_s for each in parts)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in parts])[order]
        for name in ("arrival_s", "first_s", "finish_s", "prompt", "output", "preempted")
    }
    summed: dict[str, Any] = {
        name: sum(getattr(each, name) for each in parts)
        for name in ("gaps", "busy_s", "used_s", "steps", "preemptions", "computed", "emitted", "hits")
    }
    over_time = np.zeros((loop.SAMPLES, 3))
    for each in parts:
        pieces = round(interval / each.interval_s)
        pieces = min(pieces, loop.SAMPLES)  # of engines that idle all the time
        over_time[: loop.SAMPLES // pieces] += each.over_time.reshape(-1, pieces, 3).sum(1)
    return Served(
        **columns, **summed, over_time=over_time, interval_s=interval, log=parts[0].log, replicas=replicas,
        blocks=parts[0].blocks, seconds=max(each.seconds for each in parts),
        kv_most=max(each.kv_most for each in parts), request_s=parts[0].request_s,
    )  # fmt: skip
