"""The clock of simulated engines: compiled, one event per step.

`advance` lets one engine run until a moment: steps that have ended are completed, and the next one is begun. While
all decode and nobody comes or leaves, a step costs a few operations however many sequences it has
(`_coast`): they all grow by one token. `play` brings the requests.

With a pipeline, as many steps are under way as there are stages; one of them holds at most its share of the sequences,
and those wait for it to leave the last stage before they take part in another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import njit
from foretrace.serving.llm import pace
from foretrace.serving.llm.pace import across, fixed_seconds, in_range, segment, within
from foretrace.serving.llm.scheduler import (
    EngineArrays,
    blocks_of,
    complete,
    gap_bin,
    matched_blocks,
    one_engine,
    push,
    record,
    reserves,
    schedule,
    take,
)  # fmt: skip
from foretrace.serving.llm.step_times import TimeTable

ROUND_ROBIN, LEAST_OUTSTANDING, PREFIX_AWARE = 0, 1, 2
SAMPLES = 1024  # of blocks, running and waiting sequences over time
# A prefix-aware router follows the cache unless the queues differ by more than both (SGLang's defaults), and where at
# least half of the prompt is found.
_MOST_MORE, _MOST_TIMES, _LEAST_FOUND = 32, 1.5, 0.5

# stages; flying: steps under way, from place `oldest` of a ring on; stuck: nothing could be scheduled; end: of the
# range of step times; rows: of the log. start: when the next step may begin; busy: seconds of the first stage; area:
# of used blocks over time; swap: seconds per token moved.
RUN = record(
    "stages flying oldest stuck end steps rows most_used",
    "start busy area now swap send send_per_token",
)
STEP = record("members tokens prompts decodes context outputs moved used waiting evicted", "start end")


class RunArrays(NamedTuple):
    """What the clock of an engine knows, P stages."""

    r: Any  # (1,) RUN
    ends: Float64  # (P,) of the steps under way
    numbers: Int64  # (P,) theirs
    stage_free: Float64  # (P,) when each stage has done what was begun
    residue: Int64  # (tokens of a block,) scratch
    samples: Float64  # (SAMPLES + 1, 3) seconds times used blocks, running and waiting sequences of all engines; the
    # last row begins with the seconds of a sample
    log: Any  # (steps kept,) STEP


@njit()
def _note(state: EngineArrays, run: RunArrays, start: float, end: float) -> None:
    """Count a step that was begun: in all, over time, and in the log if there is room."""
    e, r, samples = state.e[0], run.r[0], run.samples
    used = e.total - e.free - e.idle
    r.area += (end - start) * used
    r.most_used = max(r.most_used, used)
    r.busy += end - start
    r.steps += 1
    while end >= samples[SAMPLES, 0] * SAMPLES:
        for i in range(SAMPLES // 2):
            for column in range(3):
                samples[i, column] = samples[2 * i, column] + samples[2 * i + 1, column]
        samples[SAMPLES // 2 : SAMPLES] = 0.0
        samples[SAMPLES, 0] *= 2
    interval = samples[SAMPLES, 0]
    i, at = int(start / interval), start
    while at < end:
        edge = min((i + 1) * interval, end)
        samples[i, 0] += (edge - at) * used
        samples[i, 1] += (edge - at) * e.running
        samples[i, 2] += (edge - at) * e.waiting
        at = edge
        i += 1
    if r.rows < len(run.log):
        row = run.log[r.rows]
        row.start, row.end = start, end
        row.members, row.tokens, row.prompts, row.decodes = e.members, e.tokens, e.prompts, e.decodes
        row.context, row.outputs, row.moved = e.context, e.outputs, e.moved
        row.used, row.waiting, row.evicted = used, e.waiting, e.evicted
        r.rows += 1


@njit()
def _decode(table: TimeTable, batch: int, context: int) -> float:
    return across(table.batch, table.mean_context, table.decode_s, batch, context / batch)


@njit()
def _beyond(table: TimeTable, e: Any) -> float:
    """Return by which factor a step lies outside of the grids, prompts aside."""
    found = max(e.tokens / table.tokens[-1], e.outputs / table.sequences[-1])
    if e.decodes:
        found = max(found, e.decodes / table.batch[-1], e.context / e.decodes / table.mean_context[-1])
    return float(found)


@njit()
def step_seconds(state: EngineArrays, table: TimeTable, end: int, swap: float) -> float:
    """Return seconds of the step that was scheduled, on the first stage; `swap` seconds per token moved."""
    e = state.e[0]
    attention = 0.0
    beyond = _beyond(table, e)
    if e.prompts:
        for k in range(e.running):
            s = state.seqs[state.running[k]]
            whole = s.computed + s.chunk == s.prompt + s.generated
            if s.flight == e.number and not (whole and s.chunk == 1 and s.generated):
                attention += across(table.chunk, table.context, table.prefill_s, s.chunk, s.computed)
                beyond = max(beyond, s.chunk / table.chunk[-1], s.computed / table.context[-1])
    if e.decodes:
        attention += _decode(table, e.decodes, e.context)
    seconds = fixed_seconds(table, e.tokens, e.members, e.outputs) + attention + swap * e.moved
    return in_range(table, seconds, beyond, end)


@njit()
def _begin(state: EngineArrays, run: RunArrays, table: TimeTable) -> None:
    e, r = state.e[0], run.r[0]
    if schedule(state) == 0:
        r.stuck = 1
        return
    seconds = step_seconds(state, table, r.end, r.swap)
    end = r.start + seconds
    _note(state, run, r.start, end)
    run.stage_free[0] = r.start = end
    if r.stages > 1:
        later = seconds - in_range(table, table.host_s + table.host_per_sequence_s * e.members, 1.0, r.end)
        for stage in range(1, r.stages):
            end = max(end + r.send + r.send_per_token * e.tokens, run.stage_free[stage]) + later
            run.stage_free[stage] = end
    at = (r.oldest + r.flying) % r.stages
    run.ends[at], run.numbers[at] = end, e.number
    r.flying += 1


@njit()
def wake(run: RunArrays, now: float) -> None:
    """React to a change: try again to begin a step, now at the earliest."""
    r = run.r[0]
    r.stuck, r.start = 0, max(r.start, now)


@njit()
def _coast(state: EngineArrays, run: RunArrays, table: TimeTable, until: float) -> None:
    """End the step under way and begin the next one, as often as the scheduler would decide the same again."""
    e, r = state.e[0], run.r[0]
    if r.stages > 1 or e.proposals or e.decodes != e.running or e.evicted or (e.news and e.waiting):
        return
    left = 1 << 62
    run.residue[:] = 0
    for k in range(e.running):
        s = state.seqs[state.running[k]]
        left = min(left, s.output - s.generated - 1)
        run.residue[s.computed % e.block] += 1
    n, end, before, ended = e.running, run.ends[0], 0.0, 0
    fixed = fixed_seconds(table, n, n, n)
    batch, columns, values = table.batch, table.mean_context, table.decode_s
    i, j = segment(batch, n), segment(columns, e.context / n)
    while ended < left and end < until:
        need = 0 if reserves(e) else run.residue[(-1 - ended) % e.block]
        if need > e.free + e.idle:
            break
        if ended == 0:
            for k in range(n):
                state.gaps[gap_bin(end - state.seqs[state.running[k]].last)] += 1
        else:
            state.gaps[gap_bin(end - before)] += n
        if need > e.free:
            take(state, need)
        else:
            e.free -= need
        e.news = e.moved = 0
        e.context += n
        before, ended = end, ended + 1
        mean = e.context / n
        while j < len(columns) - 2 and columns[j + 1] <= mean:
            j += 1
        seconds = fixed + within(batch, columns, values, i, j, n, mean)
        if r.end != pace.MIDDLE:
            seconds = in_range(table, seconds, _beyond(table, e), r.end)
        end += seconds
        _note(state, run, before, end)
    if ended == 0:
        return
    e.number += ended
    e.computed += ended * n
    e.emitted += ended * n
    for k in range(n):
        s = state.seqs[state.running[k]]
        s.computed += ended
        s.generated += ended
        s.last, s.flight = before, e.number
        if not reserves(e):
            s.blocks = blocks_of(e, s.computed + 1) - s.held * e.share
    run.ends[0], run.numbers[0] = end, e.number
    run.stage_free[0] = r.start = end


@njit()
def advance(state: EngineArrays, run: RunArrays, table: TimeTable, mine: Int64, until: float) -> None:
    """Let an engine run: complete steps that end by `until`, begin those that may begin before it.

    In a closed loop the next one of `mine` comes when a sequence is done.
    """
    e, r = state.e[0], run.r[0]
    while True:
        if r.flying and (r.flying == r.stages or r.stuck or run.ends[r.oldest] <= r.start):
            if r.stages == 1:
                _coast(state, run, table, until)
            now = run.ends[r.oldest]
            if now > until:
                return
            r.now = now
            done = complete(state, run.numbers[r.oldest], now)
            r.oldest = (r.oldest + 1) % r.stages
            r.flying -= 1
            while done and e.following < len(mine):
                i = mine[e.following]
                e.following += e.stride
                done -= 1
                state.seqs[i].arrival = now
                push(state, i)
            wake(run, now)
        elif r.stuck == 0 and r.start < until:
            _begin(state, run, table)
        else:
            return


@njit()
def _chosen(engines: Any, router: int, found: Int64, prompt: int, block: int) -> int:
    """Return which engine gets a request; found: leading blocks of its prompt that each has in its prefix cache."""
    least = most = best = 0
    for k in range(len(engines)):
        load = engines[k].waiting + engines[k].running
        if load < engines[least].waiting + engines[least].running:
            least = k
        most = max(most, load)
        if found[k] > found[best]:
            best = k
    if router == PREFIX_AWARE and found[best] * block >= _LEAST_FOUND * prompt:
        fewest = engines[least].waiting + engines[least].running
        if most - fewest <= _MOST_MORE or most <= _MOST_TIMES * fewest:
            return best
    return least


@njit()
def _of(states: EngineArrays, runs: RunArrays, k: int) -> tuple[EngineArrays, RunArrays]:
    """Return what engine k of several knows: arrays of engines have one more dimension."""
    run = RunArrays(
        runs.r[k : k + 1], runs.ends[k], runs.numbers[k], runs.stage_free[k], runs.residue, runs.samples, runs.log[k]
    )
    return one_engine(states, k), run


@njit()
def play(states: EngineArrays, runs: RunArrays, table: TimeTable, mine: Int64, first: int, router: int) -> None:
    """Serve the requests `mine`, by arrival, with engines that share a router.

    Args:
        states: of R engines, see `_of`; their requests can all fit.
        runs: their clocks.
        table: times of steps, the same for all.
        mine: requests by arrival.
        first: how many of them come by themselves; the others follow in a closed loop, each client at its engine.
        router: one of the constants above.

    """
    engines = len(states.e)
    found = np.zeros(engines, np.int64)
    for turn in range(first):
        i = mine[turn]
        at = states.seqs[i].arrival
        k = turn % engines
        if router != ROUND_ROBIN:
            for other in range(engines):
                state, run = _of(states, runs, other)
                advance(state, run, table, mine, at)
                if router == PREFIX_AWARE:
                    found[other] = matched_blocks(state, i)
            e = states.e[0]
            k = _chosen(states.e, router, found, states.seqs[i].prompt, e.share * e.block)
        state, run = _of(states, runs, k)
        advance(state, run, table, mine, at)
        push(state, i)
        wake(run, at)
    for k in range(engines):
        state, run = _of(states, runs, k)
        advance(state, run, table, mine, np.inf)
