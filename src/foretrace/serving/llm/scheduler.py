"""What is in the next step of an engine: one scheduler for the simulator's compiled loop, its twin and a live engine.

    push(state, i)                  request i waits
    schedule(state)                 decides: `chunk` of every sequence that takes part, and `state.e[0].members` of them
    complete(state, number, now)    the step with this number has ended: tokens come out, sequences finish

Iteration-level scheduling (Yu et al., Orca, OSDI 2022) over a paged cache (Kwon et al., PagedAttention, SOSP 2023).
A sequence *knows* its prompt and what it generated; it has *computed* the keys and values of a part of that. A step
computes `chunk` more; when all is computed, a token comes out. So a preempted sequence computes prompt and generated
tokens again, and nothing of it comes out twice.

Policies:
- prefill-first (vLLM until 0.7): a step is made of whole prompts while any fits (one beyond the budget goes alone),
  else of one token of each sequence;
- chunked (Agrawal et al., Sarathi-Serve, OSDI 2024; vLLM's default since): decoding sequences first, then prompts in
  pieces, `budget` tokens in all;
- orca: decoding sequences and whole prompts together; the cache of a sequence is reserved up to its last token;
- static: as many as fit, and nobody else before all of them are done.

With a draft, a decoding sequence takes part with the tokens that were proposed behind its last one; as many come out
as the target accepts, and one more. How many it accepts is drawn by request and token, so that the order of steps does
not matter. Nobody proposes beyond the last token that a sequence wants, so the cache need not hold more than that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.compiled import njit

# Of a policy: whether prompts have steps of their own and come first, are cut into pieces, a sequence gets its whole
# cache at once, nobody joins those that run.
POLICIES = {
    "prefill-first": (1, 0, 0, 0), "chunked": (0, 1, 0, 0), "orca": (0, 0, 1, 0), "static": (0, 0, 1, 1),
}  # fmt: skip
PREEMPTIONS = ("recompute", "swap")
# Of gaps: each bin is a 128th of an octave, 60 ns to 4,600 h; of a float64, the exponent and 7 bits of the fraction.
GAP_BINS, _SHIFT = 6144, 45
_FIRST_BIN = (1023 - 24) << 7


def record(integers: str, floats: str = "") -> np.dtype[Any]:
    """Return a type of records with these fields."""
    fields = [(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in floats.split()]
    return np.dtype(fields, align=True)


ENGINE = record(
    # Rules: the policy, see POLICIES; budget (tokens of a step), slots (running sequences), batch (sequences of a
    # step), block (tokens), total (blocks), watermark (blocks that stay free when a sequence is let in), swaps
    # (preempted caches go to host memory), share (blocks of an entry of the prefix cache; 0: none), following (closed
    # loop: who is sent when one is done; the next one is `stride` later), coming (the first of those who are on their
    # way), proposals (of a draft), stages, end (of the range of step times).
    "prompts_first pieces reserves closed budget slots batch block total watermark swaps share following coming stride "
    "proposals stages end "
    # Blocks: free, idle (of entries that nobody uses), swap (free ones of host memory). The queue.
    "free idle swap head tail waiting running "
    # The step: prompts (chunks), context (tokens that decodes attend to), outputs (tokens that come out), evicted
    # (sequences), moved (tokens swapped); news: the next decision may let somebody in, though nothing is done until
    # then.
    "number members tokens prompts decodes context outputs news evicted moved "
    # The clock: steps under way, from place `oldest` of a ring on; stuck: nothing could be scheduled; rows of the log.
    "flying oldest stuck rows most_used "
    # So far: hits (tokens found in the prefix cache, again after each preemption), computed and emitted tokens.
    "preemptions done hits computed emitted steps",
    # start: when the next step may begin; busy: seconds of the first stage; area: of used blocks over time, until held;
    # swap_s: of a token moved; send_s, send_per_token_s: from a stage to the next one; request_s: closed loop, from an
    # answer until the client's next request comes.
    "start busy area held now swap_s send_s send_per_token_s request_s",
)
# blocks: of its own; held: entries of the prefix cache; flight: number of the step that it is in; swapped: blocks in
# host memory; nxt: behind it in the queue; hash_at, hash_n: its hashes; proposed: tokens of a draft in the step;
# found: tokens that the prefix cache had when it was let in first; last: time of its last token.
SEQUENCE = record(
    "prompt output generated computed chunk flight blocks held swapped nxt hash_at hash_n preempted proposed found",
    "arrival first finish last",
)
ENTRY = record("users present older newer")


class EngineArrays(NamedTuple):
    """What engines know: n requests, of which each runs some. Records are read and written in place.

    Those of one engine; those of several have one more dimension where it is said, see `one_engine`.
    """

    e: Any  # (1,) ENGINE; of R engines (R,)
    seqs: Any  # (n,) SEQUENCE
    running: Int64  # (slots,) who runs, by when they were let in; (R, slots)
    entries: Any  # (distinct hashes + 1,) ENTRY; the last one begins and ends the list of the idle; (R, ...)
    hashes: Int64  # places in `entries` of all prompts' blocks
    gaps: Int64  # (GAP_BINS,) times between tokens of a sequence
    accepted: Float64  # (proposals,) probability that so many of a round and all before are accepted
    ends: Float64  # (stages,) of the steps under way; (R, stages)
    numbers: Int64  # (stages,) theirs; (R, stages)
    stage_free: Float64  # (stages,) when each stage has done what was begun; (R, stages)
    residue: Int64  # (tokens of a block,) scratch
    samples: Float64  # (SAMPLES + 1, 3) seconds times used blocks, running and waiting sequences of all engines; the
    # last row begins with the seconds of a sample
    log: Any  # (steps kept,) STEP; (R, ...)


@njit()
def one_engine(states: EngineArrays, k: int = 0) -> EngineArrays:
    """Return what engine k of several knows."""
    return EngineArrays(
        states.e[k : k + 1], states.seqs, states.running[k], states.entries[k], states.hashes, states.gaps,
        states.accepted, states.ends[k], states.numbers[k], states.stage_free[k], states.residue, states.samples,
        states.log[k],
    )  # fmt: skip


@njit()
def blocks_of(e: Any, tokens: int) -> int:
    """Return blocks that hold so many tokens."""
    return int((tokens + e.block - 1) // e.block)


@njit()
def push(state: EngineArrays, i: int) -> None:
    """Let request i wait; all of it must fit into the cache beside the watermark."""
    e = state.e[0]
    if e.waiting:
        state.seqs[e.tail].nxt = i
    else:
        e.head, e.news = i, 1
    e.tail = i
    e.waiting += 1


@njit()
def schedule(state: EngineArrays) -> int:
    """Decide the next step; the sequences in it, 0 where there is nothing to do."""
    e = state.e[0]
    e.number += 1
    e.members = e.tokens = e.prompts = e.decodes = e.context = e.outputs = e.news = e.evicted = e.moved = 0
    if e.prompts_first:
        _admit(state)
        if e.prompts == 0:
            _go_on(state)
    else:
        _go_on(state)
        if e.evicted == 0 and (not e.closed or e.members == e.running == 0):
            _admit(state)
    return int(e.members)


@njit()
def _go_on(state: EngineArrays) -> None:
    """Take the running sequences into the step; the youngest give up their blocks where there are too few."""
    e = state.e[0]
    k = 0
    while k < e.running and e.members < e.batch and e.tokens < e.budget:
        i = state.running[k]
        s = state.seqs[i]
        if s.flight:
            k += 1
            continue
        known = s.prompt + s.generated
        chunk, proposed = min(known - s.computed, e.budget - e.tokens), 0
        if s.generated and s.computed + 1 == known:
            proposed = min(e.proposals, s.output - s.generated - 1, e.budget - e.tokens - 1)
        short = 0
        if not e.reserves:
            short = max(blocks_of(e, s.computed + chunk + proposed) - s.held * e.share - s.blocks, 0)
        while e.free + e.idle < short:
            victim = _youngest(state, k)
            _preempt(state, victim)
            if victim == k:
                break  # another one is at k now
        else:
            take(state, short)
            s.blocks += short
            _join(state, i, chunk, proposed)
            k += 1


@njit()
def _youngest(state: EngineArrays, k: int) -> int:
    """Return the place, k or behind it, of the last one let in that no step holds."""
    at = state.e[0].running - 1
    while at > k and state.seqs[state.running[at]].flight:
        at -= 1
    return int(at)


@njit()
def _admit(state: EngineArrays) -> None:
    """Let those in who waited longest, while the first of them fits."""
    e = state.e[0]
    while e.waiting and e.running < e.slots and e.members < e.batch and e.tokens < e.budget:
        i = e.head
        s = state.seqs[i]
        known = s.prompt + s.generated
        found, unused = 0, 0
        if s.computed == 0:
            found, unused = matched(state, i, (known - 1) // (e.share * e.block) if e.share else 0)
        computed = s.computed + found * e.share * e.block
        chunk = known - computed
        if e.pieces:
            chunk = min(chunk, e.budget - e.tokens)
        elif e.members and e.tokens + chunk > e.budget:
            break
        need = blocks_of(e, s.prompt + s.output - 1 if e.reserves else known) - found * e.share
        if e.free + e.idle - unused * e.share - need < e.watermark:
            break
        e.head, e.waiting = s.nxt, e.waiting - 1
        for at in range(s.hash_at, s.hash_at + found):
            entry = state.hashes[at]
            if state.entries[entry].users == 0:
                _unlink(state, entry)
            state.entries[entry].users += 1
        if s.swapped:
            e.swap += s.swapped
            e.moved += s.computed
            s.swapped = 0
        take(state, need)
        s.blocks, s.held, s.computed = need, found, computed
        e.hits += found * e.share * e.block
        if s.preempted == 0:  # what it finds later may be its own
            s.found = found * e.share * e.block
        state.running[e.running] = i
        e.running += 1
        e.news = 1
        _join(state, i, chunk, 0)


@njit()
def _join(state: EngineArrays, i: int, chunk: int, proposed: int) -> None:
    """Let sequence i take part in the step with `chunk` tokens that it knows and `proposed` ones."""
    e, s = state.e[0], state.seqs[i]
    s.chunk, s.flight, s.proposed = chunk, e.number, proposed
    e.members += 1
    e.tokens += chunk + proposed
    last = s.computed + chunk == s.prompt + s.generated
    if last:
        e.outputs += 1 + proposed
    if last and chunk == 1 and s.generated:
        e.decodes += 1
        e.context += s.computed + 1
    else:
        e.prompts += 1


@njit()
def _preempt(state: EngineArrays, k: int) -> None:
    """Let the one at place k wait again, before all others: with its cache in host memory, or with none."""
    e = state.e[0]
    i = state.running[k]
    s = state.seqs[i]
    stored = s.blocks + s.held * e.share
    _release(state, i)
    if e.swaps and e.swap >= stored:
        e.swap -= stored
        e.moved += s.computed
        s.swapped = stored
    else:
        s.computed = 0
    e.running -= 1
    for at in range(k, e.running):
        state.running[at] = state.running[at + 1]
    s.nxt = e.head
    if e.waiting == 0:
        e.tail = i
    e.head = i
    e.waiting += 1
    s.preempted += 1
    e.evicted += 1
    e.preemptions += 1


@njit()
def complete(state: EngineArrays, number: int, now: float) -> int:
    """End the step `number` at `now` seconds; how many sequences are done."""
    e = state.e[0]
    kept = 0
    for k in range(e.running):
        i = state.running[k]
        s = state.seqs[i]
        if s.flight == number:
            s.computed += s.chunk
            e.computed += s.chunk
            s.chunk = s.flight = 0
            if e.share:
                _register(state, i)
            if s.computed == s.prompt + s.generated:
                more = accepted(state, i)
                if s.generated == 0:
                    s.first = now
                else:
                    state.gaps[gap_bin(now - s.last)] += 1
                    state.gaps[0] += more  # they come out together
                s.generated += 1 + more
                s.computed += more
                s.last = now
                e.emitted += 1 + more
                e.computed += more
                if s.generated == s.output:
                    s.finish = now
                    _release(state, i)
                    continue
        state.running[kept] = i
        kept += 1
    done = e.running - kept
    e.running = kept
    e.done += done
    return int(done)


@njit()
def accepted(state: EngineArrays, i: int) -> int:
    """Return how many of the tokens proposed to sequence i the target accepts in this round."""
    s = state.seqs[i]
    if s.proposed == 0:
        return 0
    x = np.uint64(i) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(s.generated + 1) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64 (Steele et al., OOPSLA 2014)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn, count = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53, 0
    while count < s.proposed and drawn < state.accepted[count]:
        count += 1
    return count


@njit()
def gap_bin(seconds: float) -> int:
    """Return which bin of a histogram a time falls into; exact, so that it is the same everywhere."""
    return min(max(int(np.float64(seconds).view(np.int64) >> _SHIFT) - _FIRST_BIN, 0), GAP_BINS - 1)


def bin_seconds(at: Any) -> Float64:
    """Return the middle of bins; of the first one, which holds tokens that came out together, 0."""
    at = np.minimum(at, GAP_BINS - 1)
    middle: Float64 = (((at + _FIRST_BIN) << _SHIFT) + (1 << (_SHIFT - 1))).view(np.float64) * (at > 0)
    return middle


# --- blocks ----------------------------------------------------------------------------------------------------------


@njit()
def take(state: EngineArrays, count: int) -> None:
    """Take free blocks, of the entries unused for longest where there are too few."""
    e = state.e[0]
    while e.free < count:
        entry = state.entries[-1].newer
        _unlink(state, entry)
        state.entries[entry].present = 0
        e.free += e.share
    e.free -= count


@njit()
def _release(state: EngineArrays, i: int) -> None:
    """Give back the blocks of sequence i; of its entries the last ones will be evicted first."""
    e, s = state.e[0], state.seqs[i]
    e.free += s.blocks
    ends = state.entries[-1]
    for at in range(s.hash_at + s.held - 1, s.hash_at - 1, -1):
        entry = state.hashes[at]
        it = state.entries[entry]
        it.users -= 1
        if it.users == 0:
            it.older, it.newer = ends.older, len(state.entries) - 1
            state.entries[it.older].newer = ends.older = entry
            e.idle += e.share
    s.blocks = s.held = 0


@njit()
def _unlink(state: EngineArrays, entry: int) -> None:
    """Take an entry out of the list of those that nobody uses."""
    it = state.entries[entry]
    state.entries[it.older].newer, state.entries[it.newer].older = it.newer, it.older
    state.e[0].idle -= state.e[0].share


@njit()
def matched(state: EngineArrays, i: int, most: int) -> tuple[int, int]:
    """Return how many leading blocks of the prompt, at most `most`, the prefix cache holds, and how many are unused."""
    s = state.seqs[i]
    found = unused = 0
    while found < min(most, s.hash_n):
        it = state.entries[state.hashes[s.hash_at + found]]
        if it.present == 0:
            break
        unused += it.users == 0
        found += 1
    return found, unused


@njit()
def _register(state: EngineArrays, i: int) -> None:
    """Put computed whole blocks of the prompt into the prefix cache, unless another sequence has put them there."""
    e, s = state.e[0], state.seqs[i]
    while s.held < s.hash_n and (s.held + 1) * e.share * e.block <= s.computed:
        it = state.entries[state.hashes[s.hash_at + s.held]]
        if it.present:
            break
        it.present = it.users = 1
        s.blocks -= e.share
        s.held += 1
