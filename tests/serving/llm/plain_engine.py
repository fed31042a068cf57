"""The plain twin of the compiled engine: objects, lists and a loop that asks for every step anew.

Written from the rules in `scheduler` and `loop`, not from their code; it shares only the interpolation of step times,
run as Python.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf, nan

from foretrace.arrays import Float64
from foretrace.serving.llm.engine import EngineRules
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests


@dataclass(eq=False)
class Seq:
    """A request on its way."""

    number: int
    arrival: float
    prompt: int
    output: int
    hashes: list[int]
    generated: int = 0
    computed: int = 0
    blocks: int = 0
    held: list[int] = field(default_factory=list)
    swapped: int = 0
    chunk: int = 0
    proposed: int = 0
    flying: bool = False
    preempted: int = 0
    found: int = 0
    first: float = nan
    finish: float = nan
    last: float = nan

    @property
    def known(self) -> int:
        return self.prompt + self.generated


def segment(grid: Sequence[float], x: float) -> int:
    return max([i for i in range(len(grid) - 1) if grid[i] <= x], default=0)


def along(grid: Sequence[float], values: Sequence[float], x: float) -> float:
    i = segment(grid, x)
    share = (x - grid[i]) / (grid[i + 1] - grid[i])
    found = values[i] + share * (values[i + 1] - values[i])
    return max(found, values[i + 1]) if share > 1 else found


def across(
    rows: Sequence[float], columns: Sequence[float], values: Sequence[Sequence[float]], x: float, y: float
) -> float:  # fmt: skip
    i, j = segment(rows, x), segment(columns, y)

    def at(s: float, t: float) -> float:
        upper = values[i][j] + t * (values[i][j + 1] - values[i][j])
        lower = values[i + 1][j] + t * (values[i + 1][j + 1] - values[i + 1][j])
        return upper + s * (lower - upper)

    s = (x - rows[i]) / (rows[i + 1] - rows[i])
    t = (y - columns[j]) / (columns[j + 1] - columns[j])
    return max(at(s, t), at(min(s, 1), min(t, 1))) if s > 1 or t > 1 else at(s, t)


class PlainEngine:
    """One engine; `serve` runs it."""

    def __init__(self, steps: StepTimes, rules: EngineRules, blocks: int, share: int, end: int) -> None:
        self.rules, self.total, self.free, self.share = rules, blocks, blocks, share
        self.stages, self.end, self.steps = steps.stages, end, steps
        self.table = {name: getattr(steps.table, name) for name in steps.table._fields}
        self.table = {name: each.tolist() if hasattr(each, "tolist") else each for name, each in self.table.items()}
        self.watermark = int(rules.watermark * blocks)
        self.swap = int(rules.swap_bytes // (steps.kv_bytes_per_token * rules.block))
        self.swap_s = steps.kv_bytes_per_token / rules.swap_bytes_per_s
        self.users: dict[int, int] = {}  # of each entry of the prefix cache
        self.idle: OrderedDict[int, None] = OrderedDict()  # entries without users, the oldest first
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []
        self.gaps: list[float] = []
        self.under_way: deque[tuple[float, list[Seq]]] = deque()
        self.coming: deque[Seq] = deque()
        self.stage_free = [0.0] * steps.stages
        self.start, self.stuck = 0.0, True
        self.steps_begun = self.preemptions = self.hits = self.most_used = 0
        self.area = self.held = 0.0

    # --- blocks

    def available(self) -> int:
        return self.free + len(self.idle) * self.share

    def take(self, count: int) -> None:
        while self.free < count:
            entry, _ = self.idle.popitem(last=False)
            del self.users[entry]
            self.free += self.share
        self.free -= count

    def give_back(self, seq: Seq) -> None:
        self.free += seq.blocks
        for entry in reversed(seq.held):
            self.users[entry] -= 1
            if not self.users[entry]:
                self.idle[entry] = None
        seq.blocks, seq.held = 0, []

    def has(self, seq: Seq) -> int:
        return seq.blocks + self.share * len(seq.held)

    # --- what is in the next step

    def next_step(self) -> list[Seq]:
        self.step: list[Seq] = []
        self.tokens = self.moved = 0
        self.evicted = False
        policy = self.rules.policy
        if policy == "prefill-first":
            self.admit()
            if not any(not self.decodes(each) for each in self.step):
                self.go_on()
        else:
            self.go_on()
            if not self.evicted and (policy != "static" or not self.running):
                self.admit()
        return self.step

    def room(self) -> bool:
        return len(self.step) < ceil(self.rules.sequences / self.stages) and self.tokens < self.rules.budget

    def join(self, seq: Seq, chunk: int, proposed: int = 0) -> None:
        seq.chunk, seq.flying, seq.proposed = chunk, True, proposed
        self.step.append(seq)
        self.tokens += chunk + proposed

    def decodes(self, seq: Seq) -> bool:
        return seq.generated > 0 and seq.chunk == 1 and seq.computed + 1 == seq.known

    def go_on(self) -> None:
        for seq in list(self.running):
            if not self.room():
                break
            if seq.flying or seq not in self.running:
                continue
            chunk = min(seq.known - seq.computed, self.rules.budget - self.tokens)
            proposed = 0
            if seq.generated and seq.known - seq.computed == 1:
                room = self.rules.budget - self.tokens - 1
                proposed = min(len(self.steps.accepted), seq.output - seq.generated - 1, room)
            short = 0
            if self.rules.policy in ("prefill-first", "chunked"):
                short = max(ceil((seq.computed + chunk + proposed) / self.rules.block) - self.has(seq), 0)
            while self.available() < short and seq in self.running:
                behind = [each for each in self.running[self.running.index(seq) :] if not each.flying]
                self.preempt(behind[-1])
            if seq in self.running:
                self.take(short)
                seq.blocks += short
                self.join(seq, chunk, proposed)

    def preempt(self, seq: Seq) -> None:
        stored = self.has(seq)
        self.give_back(seq)
        if self.rules.preemption == "swap" and self.swap >= stored:
            self.swap -= stored
            self.moved += seq.computed
            seq.swapped = stored
        else:
            seq.computed = 0
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        seq.preempted += 1
        self.preemptions += 1
        self.evicted = True

    def admit(self) -> None:
        rules = self.rules
        while self.waiting and len(self.running) < rules.sequences and self.room():
            seq = self.waiting[0]
            found: list[int] = []
            if not seq.computed and self.share:
                for entry in seq.hashes[: (seq.known - 1) // (self.share * rules.block)]:
                    if entry not in self.users:
                        break
                    found.append(entry)
            computed = seq.computed + len(found) * self.share * rules.block
            chunk = seq.known - computed
            if rules.policy == "chunked":
                chunk = min(chunk, rules.budget - self.tokens)
            elif self.step and self.tokens + chunk > rules.budget:
                break
            whole = seq.prompt + seq.output - 1 if rules.policy in ("orca", "static") else seq.known
            need = ceil(whole / rules.block) - len(found) * self.share
            unused = sum(entry in self.idle for entry in found)
            if self.available() - unused * self.share - need < self.watermark:
                break
            self.waiting.popleft()
            for entry in found:
                self.users[entry] += 1
                self.idle.pop(entry, None)
            if seq.swapped:
                self.swap += seq.swapped
                self.moved += seq.computed
                seq.swapped = 0
            self.take(need)
            seq.blocks, seq.held, seq.computed = need, found, computed
            self.hits += len(found) * self.share * rules.block
            if not seq.preempted:
                seq.found = len(found) * self.share * rules.block
            self.running.append(seq)
            self.join(seq, chunk)

    # --- time

    def seconds(self) -> tuple[float, float]:
        """Of the step, and of the host in it."""
        t = self.table
        n, decodes = len(self.step), [each for each in self.step if self.decodes(each)]
        outputs = sum(1 + each.proposed for each in self.step if each.computed + each.chunk == each.known)
        beyond = max(self.tokens / t["tokens"][-1], outputs / t["sequences"][-1])
        attention = 0.0
        for seq in self.running:
            if seq in self.step and seq not in decodes:
                pieces, before = 0.0, float(seq.computed)
                while (left := seq.chunk + seq.computed - before) > t["chunk"][-1]:
                    pieces += across(t["chunk"], t["context"], t["prefill_s"], t["chunk"][-1], before)
                    before += t["chunk"][-1]
                attention += pieces + across(t["chunk"], t["context"], t["prefill_s"], left, before)
                beyond = max(beyond, seq.chunk / t["chunk"][-1], seq.computed / t["context"][-1])
        if decodes:
            mean = sum(each.computed + 1 for each in decodes) / len(decodes)
            attention += across(t["batch"], t["mean_context"], t["decode_s"], len(decodes), mean)
            beyond = max(beyond, len(decodes) / t["batch"][-1], mean / t["mean_context"][-1])
        host = t["host_s"] + t["host_per_sequence_s"] * n
        linear = along(t["tokens"], t["linear_s"], self.tokens) + along(t["sequences"], t["output_s"], outputs)
        seconds = linear + host + attention + self.swap_s * self.moved
        if self.end < 0:
            return seconds * t["low"] / max(beyond, 1), host * t["low"]
        if self.end > 0:
            return seconds * t["high"] * max(beyond, 1), host * t["high"]
        return seconds, host

    def hold(self, until: float) -> None:
        """Until something changes, the cache holds what it does now."""
        self.area += max(until - self.held, 0.0) * (self.total - self.available())
        self.held = max(until, self.held)

    def begin(self) -> None:
        self.hold(self.start)
        step = self.next_step()
        if not step:
            self.stuck = True
            return
        seconds, host = self.seconds()
        used = self.total - self.available()
        self.most_used = max(self.most_used, used)
        end = self.start + seconds
        self.steps_begun += 1
        self.stage_free[0] = self.start = end
        for stage in range(1, self.stages):
            sent = end + self.steps.send_s + self.steps.send_per_token_s * self.tokens
            end = max(sent, self.stage_free[stage]) + (seconds - host)
            self.stage_free[stage] = end
        self.under_way.append((end, step))

    def complete(self) -> list[Seq]:
        now, step = self.under_way.popleft()
        self.hold(now)
        done = []
        for seq in [each for each in self.running if each in step]:
            seq.computed += seq.chunk
            seq.chunk, seq.flying = 0, False
            size = self.share * self.rules.block
            while len(seq.held) < len(seq.hashes) and (len(seq.held) + 1) * size <= seq.computed:
                entry = seq.hashes[len(seq.held)]
                if entry in self.users:
                    break
                self.users[entry] = 1
                seq.blocks -= self.share
                seq.held.append(entry)
            if seq.computed == seq.known:
                accepted = self.accepted(seq)
                if seq.generated == 0:
                    seq.first = now
                else:
                    self.gaps += [now - seq.last] + accepted * [0.0]
                seq.generated += 1 + accepted
                seq.computed += accepted
                seq.last = now
                if seq.generated == seq.output:
                    seq.finish = now
                    self.give_back(seq)
                    self.running.remove(seq)
                    done.append(seq)
        self.wake(now)
        return done

    def accepted(self, seq: Seq) -> int:
        x = (seq.number * 0x9E3779B97F4A7C15 + (seq.generated + 1) * 0xD1B54A32D192ED03) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        drawn = ((x ^ x >> 31) >> 11) / 2**53
        found = 0
        for survival in self.steps.accepted[: seq.proposed]:
            if drawn >= survival:
                break
            found += 1
        return found

    def push(self, seq: Seq) -> None:
        self.hold(seq.arrival)
        self.waiting.append(seq)
        self.wake(seq.arrival)

    def wake(self, now: float) -> None:
        self.stuck, self.start = False, max(self.start, now)

    def advance(self, until: float, following: deque[Seq]) -> None:
        """Clients whose answer has come send the next one, which comes later by what a request takes on its way."""
        while True:
            limit = min(until, self.coming[0].arrival) if self.coming else until
            full = len(self.under_way) == self.stages
            if self.under_way and (full or self.stuck or self.under_way[0][0] <= self.start):
                now = self.under_way[0][0]
                if now <= limit:
                    for _ in self.complete():
                        if following:
                            self.coming.append(following.popleft())
                            self.coming[-1].arrival = now + self.steps.request_s
                    continue
            elif not self.stuck and self.start < limit:
                self.begin()
                continue
            if not self.coming or self.coming[0].arrival > until:
                return
            self.push(self.coming.popleft())


def serve(
    requests: Requests, steps: StepTimes, rules: EngineRules, *, end: int = 0, begun_s: Float64 | None = None
) -> tuple[list[Seq], PlainEngine]:  # fmt: skip
    """Serve requests with one engine; those that can never fit are left as they are."""
    share = requests.hash_tokens // rules.block if rules.prefix_cache and len(requests.hashes) else 0
    engine = PlainEngine(steps, rules, rules.blocks(steps, int(requests.prompt.max())), share, end)
    seqs = []
    for i in range(len(requests)):
        hashes = requests.hashes[requests.hash_first[i] : requests.hash_first[i + 1]].tolist()
        seq = Seq(i, float(requests.arrival_s[i]), int(requests.prompt[i]), int(requests.output[i]), [])
        if share:
            seq.hashes = hashes[: seq.prompt // requests.hash_tokens]
        if begun_s is not None:
            seq.computed, seq.generated, seq.first, seq.last = seq.prompt, 1, float(begun_s[i]), float(begun_s[i])
        seqs.append(seq)
    can = [
        each for each in seqs if engine.total - ceil((each.prompt + each.output - 1) / rules.block) >= engine.watermark
    ]
    first = requests.concurrency or len(can)
    if requests.concurrency:
        for seq in seqs:
            seq.arrival += steps.request_s
    following = deque(can[first:])
    for seq in can[:first]:
        engine.advance(seq.arrival, following)
        engine.push(seq)
    engine.advance(inf, following)
    return seqs, engine
