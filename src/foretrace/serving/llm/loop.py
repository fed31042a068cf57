"""The clock of simulated engines: compiled, one event per step.

`advance` lets one engine run until a moment: steps that have ended are completed, and the next one is begun. While
all decode and nobody comes or leaves, a step costs a few operations however many sequences it has
(`_coast`): they all grow by one token. `play` brings the requests.

With a pipeline, as many steps are under way as there are stages; one of them holds at most its share of the sequences,
and those wait for it to leave the last stage before they take part in another one.
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64
from foretrace.compiled import njit
from foretrace.serving.llm import scheduler, step_times
from foretrace.serving.llm.scheduler import EngineArrays, record
from foretrace.serving.llm.step_times import MIDDLE, TimeTable

ROUTERS = ("round-robin", "least-outstanding", "prefix-aware")
ROUND_ROBIN, _, PREFIX_AWARE = range(3)
SAMPLES = 1024  # of blocks, running and waiting sequences over time
# A prefix-aware router follows the cache unless the queues differ by more than both (SGLang's defaults), and where at
# least half of the prompt is found.
_MOST_MORE, _MOST_TIMES, _LEAST_FOUND = 32, 1.5, 0.5
STEP = record("members tokens prompts decodes context outputs moved used waiting evicted", "start end")


@njit()
def _hold(state: EngineArrays, until: float) -> None:
    """Count over time what the engine holds until the next event, which changes it."""
    e, samples = state.e[0], state.samples
    used, at = e.total - e.free - e.idle, e.held
    e.held = max(at, until)
    if e.running + e.waiting == 0 or at >= until:
        return
    e.area += (until - at) * used
    while until >= samples[SAMPLES, 0] * SAMPLES:
        for i in range(SAMPLES // 2):
            for column in range(3):
                samples[i, column] = samples[2 * i, column] + samples[2 * i + 1, column]
        samples[SAMPLES // 2 : SAMPLES] = 0.0
        samples[SAMPLES, 0] *= 2
    interval = samples[SAMPLES, 0]
    i = int(at / interval)
    while at < until:
        edge = min((i + 1) * interval, until)
        samples[i, 0] += (edge - at) * used
        samples[i, 1] += (edge - at) * e.running
        samples[i, 2] += (edge - at) * e.waiting
        at = edge
        i += 1


@njit()
def _note(state: EngineArrays, start: float, end: float) -> None:
    """Count a step that was begun: in all, and in the log if there is room."""
    e = state.e[0]
    used = e.total - e.free - e.idle
    e.most_used = max(e.most_used, used)
    e.busy += end - start
    e.steps += 1
    if e.rows < len(state.log):
        row = state.log[e.rows]
        row.start, row.end = start, end
        row.members, row.tokens, row.prompts, row.decodes = e.members, e.tokens, e.prompts, e.decodes
        row.context, row.outputs, row.moved = e.context, e.outputs, e.moved
        row.used, row.waiting, row.evicted = used, e.waiting, e.evicted
        e.rows += 1


@njit()
def step_seconds(state: EngineArrays, table: TimeTable) -> float:
    """Return seconds of the step that was scheduled, on the first stage."""
    e = state.e[0]
    attention, far = 0.0, step_times.beyond(table, e)
    if e.prompts:
        for k in range(e.running):
            s = state.seqs[state.running[k]]
            whole = s.computed + s.chunk == s.prompt + s.generated
            if s.flight == e.number and not (whole and s.chunk == 1 and s.generated):
                attention += step_times.prefill_seconds(table, s.chunk, s.computed)
                far = max(far, s.chunk / table.chunk[-1], s.computed / table.context[-1])
    if e.decodes:
        attention += step_times.decode_seconds(table, e.decodes, e.context / e.decodes)
    seconds = step_times.fixed_seconds(table, e.tokens, e.members, e.outputs) + attention + e.swap_s * e.moved
    return step_times.in_range(table, seconds, far, e.end)


@njit()
def _begin(state: EngineArrays, table: TimeTable) -> None:
    e = state.e[0]
    _hold(state, e.start)
    if scheduler.schedule(state) == 0:
        e.stuck = 1
        return
    seconds = step_seconds(state, table)
    end = e.start + seconds
    _note(state, e.start, end)
    state.stage_free[0] = e.start = end
    if e.stages > 1:
        later = seconds - step_times.in_range(table, table.host_s + table.host_per_sequence_s * e.members, 1.0, e.end)
        for stage in range(1, e.stages):
            end = max(end + e.send_s + e.send_per_token_s * e.tokens, state.stage_free[stage]) + later
            state.stage_free[stage] = end
    at = (e.oldest + e.flying) % e.stages
    state.ends[at], state.numbers[at] = end, e.number
    e.flying += 1


@njit()
def _coast(state: EngineArrays, table: TimeTable, until: float) -> None:
    """End the step under way and begin the next one, as often as the scheduler would decide the same again."""
    e = state.e[0]
    if e.stages > 1 or e.proposals or e.decodes != e.running or e.evicted or (e.news and e.waiting):
        return
    left = 1 << 62
    state.residue[:] = 0
    for k in range(e.running):
        s = state.seqs[state.running[k]]
        left = min(left, s.output - s.generated - 1)
        state.residue[s.computed % e.block] += 1
    n, end, before, ended = e.running, state.ends[0], 0.0, 0
    fixed = step_times.fixed_seconds(table, n, n, n)
    batch, columns, values = table.batch, table.mean_context, table.decode_s
    i, j = step_times.segment(batch, n), step_times.segment(columns, e.context / n)
    while ended < left and end < until:
        need = 0 if e.reserves else state.residue[(-1 - ended) % e.block]
        if need > e.free + e.idle:
            break
        if ended == 0:
            for k in range(n):
                state.gaps[scheduler.gap_bin(end - state.seqs[state.running[k]].last)] += 1
        else:
            state.gaps[scheduler.gap_bin(end - before)] += n
        _hold(state, end)
        if need > e.free:  # a call passes all arrays on, which takes as long as the rest of such a step
            scheduler.take(state, need)
        else:
            e.free -= need
        e.news = e.moved = 0
        e.context += n
        before, ended = end, ended + 1
        mean = e.context / n
        while j < len(columns) - 2 and columns[j + 1] <= mean:
            j += 1
        seconds = fixed + step_times.within(batch, columns, values, i, j, n, mean)
        if e.end != MIDDLE:
            seconds = step_times.in_range(table, seconds, step_times.beyond(table, e), e.end)
        end += seconds
        _note(state, before, end)
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
        if not e.reserves:
            s.blocks = scheduler.blocks_of(e, s.computed + 1) - s.held * e.share
    state.ends[0], state.numbers[0] = end, e.number
    state.stage_free[0] = e.start = end


@njit()
def _push(state: EngineArrays, i: int, now: float) -> None:
    """Let request i wait from now on."""
    e = state.e[0]
    _hold(state, now)
    scheduler.push(state, i)
    e.stuck, e.start = 0, max(e.start, now)


@njit()
def advance(state: EngineArrays, table: TimeTable, mine: Int64, until: float) -> None:
    """Let an engine run: complete steps that end by `until`, begin those that may begin before it.

    In a closed loop a client sends the next one of `mine` when a sequence is done; it comes `request_s` later.
    """
    e = state.e[0]
    while True:
        comes = state.seqs[mine[e.coming]].arrival if e.coming < min(e.following, len(mine)) else np.inf
        limit = min(until, comes)
        if e.flying and (e.flying == e.stages or e.stuck or state.ends[e.oldest] <= e.start):
            if e.stages == 1:
                _coast(state, table, limit)
            now = state.ends[e.oldest]
            if now <= limit:
                e.now = now
                _hold(state, now)
                done = scheduler.complete(state, state.numbers[e.oldest], now)
                e.oldest = (e.oldest + 1) % e.stages
                e.flying -= 1
                while done and e.following < len(mine):
                    state.seqs[mine[e.following]].arrival = now + e.request_s
                    e.following += e.stride
                    done -= 1
                e.stuck, e.start = 0, max(e.start, now)
                continue
        elif e.stuck == 0 and e.start < limit:
            _begin(state, table)
            continue
        if comes > until or comes == np.inf:
            return
        _push(state, mine[e.coming], comes)
        e.coming += e.stride


@njit()
def _chosen(load: Int64, found: Int64, prompt: int, block: int) -> int:
    """Return which engine gets a request of so many `prompt` tokens.

    `load` (R,): requests at each; `found` (R,): leading blocks of the prompt, of `block` tokens, in each prefix cache,
    0 unless the router is prefix-aware.
    """
    least, best, most = np.argmin(load), np.argmax(found), load.max()
    near = most - load[least] <= _MOST_MORE or most <= _MOST_TIMES * load[least]
    return int(best if near and found[best] * block >= _LEAST_FOUND * prompt else least)


@njit()
def play(states: EngineArrays, table: TimeTable, mine: Int64, first: int, router: int) -> None:
    """Serve the requests `mine`, by arrival, with engines that share a router.

    Args:
        states: of R engines; their requests can all fit.
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
                state = scheduler.one_engine(states, other)
                advance(state, table, mine, at)
                if router == PREFIX_AWARE:
                    found[other] = scheduler.matched(state, i, states.seqs[i].hash_n)[0]
            e = states.e
            k = _chosen(e.waiting + e.running, found, states.seqs[i].prompt, e[0].share * e[0].block)
        state = scheduler.one_engine(states, k)
        advance(state, table, mine, at)
        _push(state, i, at)
    for k in range(engines):
        state = scheduler.one_engine(states, k)
        advance(state, table, mine, np.inf)
