"""How many times faster engines are than in an earlier commit: the same cases in turns, and whether answers are equal.

    python benchmarks/before.py [--ref COMMIT] [--runs 3] [--turns 2] [--only WORDS] [fleet] [flows] [batch]

Each turn is a process of its own with the package of one of the two commits (the earlier one is unpacked into a
temporary folder), plays a case after a short run that loads what is compiled, and prints its CPU seconds and a hash of
the answer. The ratio is that of the least times. Equal: the hashes are, or the largest difference of two ends in ns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tables import ROOT

BEFORE = "b9116561"  # the engines before queues, flows and variants were made faster
Case = tuple[float, str, Callable[[], Any], Callable[[Any], tuple[str, list[int]]]]  # work, unit, run, answer


def fleets() -> dict[str, Callable[[], Case]]:
    """Philly's log on 480 GPUs, and a tenth of it that comes forty times as fast, so that thousands wait."""
    import fleet
    from foretrace.fleet.cluster import ClusterTree
    from foretrace.fleet.simulate import Simulation

    cluster = ClusterTree.of((6, 10, 8))

    def case(name: str, placed: bool, crowded: bool) -> Case:
        log = fleet.philly()[0]
        if crowded:
            log = log.take(np.arange(8000))
            log = log.with_columns(submit_ns=log.submit_ns // 40)
        speeds = fleet.closed_form(cluster) if placed else None
        Simulation(log.take(np.arange(500)), cluster, fleet.policy_of(name), speeds=speeds).run()

        def run() -> Any:
            return Simulation(log, cluster, fleet.policy_of(name), speeds=speeds).run().result()

        def answer(result: Any) -> tuple[str, list[int]]:
            columns = ("start_ns", "end_ns", "held_ns", "dead_ns", "starts", "preempted", "waited_ns")
            return hashlib.sha256(b"".join(getattr(result, each).tobytes() for each in columns)).hexdigest(), []

        return len(log), "jobs/s", run, answer

    busy = [(name, False) for name in ("fifo-skip", "las", "srtf", "tiresias")]
    busy += [(name, True) for name in ("tiresias", "dally")]
    return {
        f"{name}{', speeds by placement' if placed else ''}, {words}": partial(case, name, placed, crowded)
        for words, crowded in (("82 k jobs", False), ("8 k jobs that come at once", True)) for name, placed in busy
    }  # fmt: skip


def flows() -> dict[str, Callable[[], Case]]:
    """Chains of transfers, 2,000 at once, on links of unlike capacity; an event is a flow that joins or ends."""
    import engine
    from foretrace.simulate.flows.flows import simulate_flows

    def case(chains: int, length: int, links: int, route: Any) -> Case:
        job = engine.flow_chains(chains, length, links, route)
        simulate_flows(*job)
        return 2 * chains * length, "events/s", lambda: simulate_flows(*job), lambda ends: ("", ends[1].tolist())

    return {what: partial(case, *row[1:]) for what, row in engine.FLOWS.items()}


def variants() -> dict[str, Callable[[], Case]]:
    """Variants of a graph of a million tasks beside one another."""
    import engine
    from foretrace.simulate.replay import replay, replay_variants

    def case(count: int, removed: bool) -> Case:
        graph = engine.random_graph(1_000_000, ordered=True)
        random = np.random.default_rng(1)
        group, scale = random.integers(-1, 100, len(graph)).astype(np.int32), random.random((100, max(count, 1)))
        gone = np.arange(100)[:, None] == np.arange(count) if removed else None

        def once() -> Any:
            return replay(graph)[1] if count == 0 else replay_variants(graph, group, scale, gone)

        once()
        return len(graph) * max(count, 1), "task-variants/s", once, _hashed

    return {
        "replay": partial(case, 0, False), "32 variants": partial(case, 32, False),
        "32 variants with removed tasks": partial(case, 32, True), "64 variants": partial(case, 64, False),
    }  # fmt: skip


def _hashed(found: Any) -> tuple[str, list[int]]:
    return hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest(), []


PARTS: dict[str, Callable[[], dict[str, Callable[[], Case]]]] = {"fleet": fleets, "flows": flows, "batch": variants}


def one(part: str, name: str, runs: int) -> dict[str, Any]:
    """Play one case with the package that this process imports."""
    work, unit, run, answer = PARTS[part]()[name]()
    least = float("inf")
    for _ in range(runs):
        begin = time.process_time()
        found = run()
        least = min(least, time.process_time() - begin)
    digest, ends = answer(found)
    return {"seconds": least, "work": work, "unit": unit, "hash": digest, "ends": ends}


def measure(
    parts: list[str], ref: str = BEFORE, runs: int = 3, turns: int = 2, only: str = ""
) -> list[tuple[str, ...]]:
    """Rows: case, rate before and now, how many times that is, and how far answers are apart."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        old = subprocess.run(["git", "archive", ref, "src"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=old, check=True)
        for part in parts:
            for name in PARTS[part]():
                if only not in name:
                    continue
                played: dict[str, list[dict[str, Any]]] = {"before": [], "now": []}
                for which in ("before", "now") * turns:
                    source = Path(folder, "src") if which == "before" else ROOT / "src"
                    given = {"part": part, "name": name, "runs": runs}
                    done = subprocess.run(
                        [sys.executable, __file__, "--one", json.dumps(given)], check=True, capture_output=True,
                        env=os.environ | {"PYTHONPATH": f"{source}:{ROOT}"}, text=True,
                    )  # fmt: skip
                    played[which].append(json.loads(done.stdout))
                before, now = (min(played[each], key=lambda row: row["seconds"]) for each in played)
                apart = np.abs(np.array(before["ends"]) - np.array(now["ends"])).max(initial=0)
                same = "DIFFERENT" if before["hash"] != now["hash"] else f"within {apart} ns" if apart else "equal"
                rows.append((
                    name, f"{before['work'] / before['seconds']:,.0f}",
                    f"{now['work'] / now['seconds']:,.0f} {now['unit']}", f"{before['seconds'] / now['seconds']:.2f}",
                    same,
                ))  # fmt: skip
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all by default")
    parser.add_argument("--ref", default=BEFORE)
    parser.add_argument("--runs", type=int, default=3, help="plays per turn, of which the quickest counts")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(**json.loads(given.one))))
    else:
        measure(given.parts or list(PARTS), given.ref, given.runs, given.turns, given.only)


if __name__ == "__main__":
    main()
