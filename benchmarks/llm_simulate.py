"""Speed of the engine simulator: requests per CPU second, its plain twin in the same run, and how cost grows.

    python benchmarks/llm_simulate.py            # speed at several loads, against the twin
    python benchmarks/llm_simulate.py growth     # 10,000 to 10 million requests, 1 to 10,000 replicas; minutes

CPU seconds of this process, the best of several runs behind one that compiles.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial

from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests, requests
from tests.serving.llm.plain_engine import serve

MODEL, DEVICE, SHAPE = "llama-3-8b", "h100", "prompt=1024 output=256"
LOADS = ((2, "chunked"), (2, "prefill-first"), (8, "chunked"), (8, "prefill-first"), (20, "chunked"))
GROWTH = ((10_000, 1), (100_000, 1), (1_000_000, 1), (1_000_000, 100), (1_000_000, 10_000), (10_000_000, 1000))


def cpu_s(work: Callable[[], object], runs: int) -> float:
    """The least CPU seconds of several runs."""
    return min(_once(work) for _ in range(runs))


def _once(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def speed() -> None:
    """A row per load and policy."""
    steps = step_times(MODEL, DEVICE)
    print(f"{MODEL} on {DEVICE}, {SHAPE}, an hour of Poisson arrivals; the twin on its first 5 minutes")
    print("| requests/s | policy | requests per CPU-s | steps per request | ns per step | × the twin |")
    print("|---|---|---|---|---|---|")
    for qps, policy in LOADS:
        rules = EngineRules(policy=policy)
        asked, few = (requests(f"poisson qps={qps} {SHAPE}", seconds=seconds) for seconds in (3600, 300))
        found = simulate(asked, steps, rules)
        compiled = cpu_s(partial(simulate, asked, steps, rules), 7)
        ratio = cpu_s(partial(serve, few, steps, rules), 1) / cpu_s(partial(simulate, few, steps, rules), 7)
        print(f"| {qps} | {policy} | {len(asked) / compiled:,.0f} | {found.steps / len(asked):.1f} | "
              f"{compiled / found.steps * 1e9:.0f} | {ratio:,.0f} |", flush=True)  # fmt: skip


def growth() -> None:
    """A row per number of requests and replicas; every replica has 2 requests per second. On one core, to count it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    steps = step_times(MODEL, DEVICE)
    simulate(requests(f"poisson qps=2 requests=100 {SHAPE}"), steps)  # compiles
    print("| requests | replicas | CPU-s | requests per CPU-s | memory, MB |")
    print("|---|---|---|---|---|")
    for count, replicas in GROWTH:
        asked = requests(f"poisson qps={2 * replicas} requests={count} {SHAPE}")
        took = _once(partial(_checked, asked, steps, replicas))
        use = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"| {count:,} | {replicas:,} | {took:.2f} | {count / took:,.0f} | {use / 1024:,.0f} |", flush=True)


def _checked(asked: Requests, steps: StepTimes, replicas: int) -> None:
    found = simulate(asked, steps, replicas=replicas)
    assert found.emitted == asked.output.sum(), "a token was lost"


if __name__ == "__main__":
    growth() if "growth" in sys.argv[1:] else speed()
