"""`LiveEngine`: a small decoder served for real on this machine, by the scheduler that the simulator runs.

Only the step differs: here a `PagedDecoder` computes it, there `StepTimes` say how long it takes. The clock is the CPU
time of the thread, so that neighbours on the machine count less, and idle time is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.serving.llm import scheduler
from foretrace.serving.llm.engine import EngineRules, Served, engine_arrays
from foretrace.serving.llm.loop import STEP, step_seconds
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests
from reproductions.live_engine.decoder import BLOCK, Chunk, DecoderSize, PagedDecoder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRun:
    """A run of a live engine: what a simulation would answer, and what only a real one has.

    Attributes:
        served: as of a simulation, without samples over time.
        tokens: that came out, by request.
        expected_s: (steps,) what `StepTimes` say of each step; empty where none were given.

    """

    served: Served
    tokens: tuple[tuple[int, ...], ...]
    expected_s: Float64

    @property
    def step_s(self) -> Float64:
        """(steps,) measured seconds."""
        return np.asarray(self.served.log["end"] - self.served.log["start"])


class LiveEngine:
    """A decoder and the pool of blocks of its cache. PyTorch computes with one thread, from then on in this process."""

    def __init__(self, size: DecoderSize | None = None, *, blocks: int = 512, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self.blocks = blocks
        self.decoder = PagedDecoder(size or DecoderSize(), blocks, seed=seed)

    def serve(
        self, requests: Requests, rules: EngineRules, *, seed: int = 0, steps: StepTimes | None = None
    ) -> LiveRun:
        """Serve requests, with prompts drawn from `seed`; the next token is the likeliest one.

        Raises ForetraceError for blocks of another size, for swapping, and for a request that the cache cannot hold.
        """
        _check(requests, rules, self.blocks)
        state = scheduler.one_engine(engine_arrays(requests, rules, self.blocks))
        e, seqs = state.e[0], state.seqs
        draw = np.random.default_rng(seed)
        known: list[list[int]] = [draw.integers(self.decoder.size.vocabulary, size=n).tolist() for n in requests.prompt]
        pool = _Pool(self.blocks, len(requests))
        came, coming = 0, min(requests.concurrency, len(requests)) if requests.concurrency else len(requests)
        now, used_s, expected, log = 0.0, 0.0, [], []
        while e.done < len(requests):
            began = time.thread_time()
            while came < coming and seqs[came].arrival <= now:
                scheduler.push(state, came)
                came += 1
            if scheduler.schedule(state) == 0:
                now = max(now, float(seqs[came].arrival))  # nobody is there: the idle time is skipped
                continue
            who = [i for i in state.running[: e.running].tolist() if seqs[i].flight == e.number]
            pool.follow(seqs.blocks, who)
            chunks = [
                Chunk(
                    known[i][seqs[i].computed : seqs[i].computed + seqs[i].chunk], int(seqs[i].computed), pool.held[i]
                )
                for i in who
            ]
            row = (e.members, e.tokens, e.prompts, e.decodes, e.context, e.outputs, 0, e.total - e.free,
                   e.waiting, e.evicted)  # fmt: skip
            for i, chunk, token in zip(who, chunks, self.decoder(chunks).argmax(dim=1).tolist(), strict=True):
                if chunk.context + len(chunk.tokens) == len(known[i]):
                    known[i].append(token)
            start, now = now, now + time.thread_time() - began
            log.append((*row, start, now))
            used_s += (now - start) * (e.total - e.free)
            if steps is not None:
                expected.append(step_seconds(state, steps.table))
            for _ in range(min(scheduler.complete(state, e.number, now), len(requests) - coming)):
                seqs[coming].arrival = now
                coming += 1
        kept = np.array(log, STEP).view(np.recarray)
        return LiveRun(
            served=Served(
                arrival_s=seqs.arrival, first_s=seqs.first, finish_s=seqs.finish, prompt=requests.prompt,
                output=requests.output, preempted=seqs.preempted, found=seqs.found, gaps=state.gaps,
                over_time=np.zeros((0, 3)), interval_s=1.0, log=kept, replicas=1, blocks=self.blocks, seconds=now,
                busy_s=float((kept.end - kept.start).sum()), used_s=used_s, kv_most=kept.used.max() / self.blocks,
                steps=len(kept), preemptions=int(e.preemptions), computed=int(e.computed), emitted=int(e.emitted),
                hits=0,
            ),
            tokens=tuple(tuple(each[n:]) for each, n in zip(known, requests.prompt, strict=True)),
            expected_s=np.array(expected),
        )  # fmt: skip


def _check(requests: Requests, rules: EngineRules, blocks: int) -> None:
    if rules.block != BLOCK or rules.preemption != "recompute" or rules.prefix_cache:
        raise ForetraceError(
            f"a live engine has blocks of {BLOCK} tokens, computes again what it preempted and keeps no prefixes; give "
            f"`block={BLOCK}`, `preemption=recompute` and `prefix_cache=False`."
        )
    most = int((requests.prompt + requests.output - 1).max())
    least = -(-most // BLOCK) + int(rules.watermark * blocks)
    if least > blocks:
        raise ForetraceError(f"a request of {most} tokens needs `blocks={least}`, got {blocks}.")


class _Pool:
    """Which blocks each sequence holds; how many is the scheduler's to say."""

    def __init__(self, blocks: int, sequences: int) -> None:
        self.free = list(range(blocks))
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self._holding: set[int] = set()

    def follow(self, wanted: Sequence[int], who: Sequence[int]) -> None:
        """Take back blocks of sequences that gave them up, then hand out those that `who` need for the next step."""
        for i in list(self._holding):
            spare = self.held[i][wanted[i] :]
            self.free += spare
            del self.held[i][wanted[i] :]
            if not self.held[i]:
                self._holding.remove(i)
        for i in who:
            while len(self.held[i]) < wanted[i]:
                self.held[i].append(self.free.pop())
            self._holding.add(i)
