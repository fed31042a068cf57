"""Predict a change from the recording before it, then make the change and measure it, on this machine's CPU.

    python benchmarks/live_pairs.py [NAME ...]

Every pair runs in a process of its own whose allocator is told to keep memory (page faults would otherwise be the
largest unmodelled term) and which uses one thread. The order is: record the job as it is, predict from that
recording alone, and only then run both arms and the first one once more (A/A, the noise floor), in short blocks
A B A' B' ... whose ratios are taken block by block.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

# Keep memory instead of giving it back: see docs/accuracy.md. Must be in place before the process starts.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}

ENOUGH_CORES = 1.8  # a training process and its worker, with a little left to others


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A job, what is changed about it, and how foretrace is asked to predict that."""

    name: str
    job: str
    change: dict[str, int | bool]  # fields of `live_models.Arm`
    do: tuple[str, ...]
    loaded: bool = False  # batches come from a data loader

    def block(self, step_s: float) -> tuple[int, int, int]:
        """Discarded steps, measured steps, blocks; a fresh loader first empties what it fetched ahead."""
        if self.loaded:
            return 5, 8, 12
        return 1, max(3, round(0.25 / step_s)), 20


PAIRS = (
    Pair(
        name="cnn, loader workers 0 → 1",
        job="cnn",
        change={"workers": 1},
        do=("prefetch-data workers=1",),
        loaded=True,
    ),
    Pair(
        name="U-Net, loader workers 0 → 2 (slow disk)",
        job="unet",
        change={"workers": 2},
        do=("prefetch-data workers=2",),
        loaded=True,
    ),
    Pair(name="recommender, fused AdamW", job="recommender", change={"fused": True}, do=("fused-optimizer",)),
    Pair(name="GRU tagger, fused AdamW", job="gru", change={"fused": True}, do=("fused-optimizer",)),
    Pair(name="U-Net, bf16 autocast", job="unet", change={"bf16": True}, do=("mixed-precision",)),
    Pair(name="graph network, bf16 autocast", job="gnn", change={"bf16": True}, do=("mixed-precision",)),
    Pair(
        name="graph network, bf16 and fused AdamW",
        job="gnn",
        change={"bf16": True, "fused": True},
        do=("mixed-precision", "fused-optimizer"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One pair, predicted and measured. Ratios are step after / step before."""

    name: str
    do: tuple[str, ...]
    before_s: float  # measured, median of blocks
    after_s: float
    predicted: float
    predicted_low: float
    predicted_high: float
    measured: float
    measured_p10: float
    measured_p90: float
    same: float  # the first arm against itself, p90 of |ratio − 1| over blocks
    clock: str  # "wall" where steps wait for a loader, else "cpu": the process's own time
    wall_over_cpu: float  # of the first arm; above 1.1 something else used the cores
    free_cores: float  # what this machine had left for us, the lower of before and after

    @property
    def disturbed(self) -> bool:
        """Whether a loader pair lacked a core of its own, so that it says nothing about a machine that has one."""
        return self.clock == "wall" and self.free_cores < ENOUGH_CORES

    @property
    def error(self) -> float:
        """Prediction against measurement, share of the treated step."""
        return self.predicted / self.measured - 1.0

    @property
    def covered(self) -> bool:
        """Whether the predicted interval meets the measured median."""
        return self.predicted_low <= self.measured <= self.predicted_high


def live_pairs(names: Sequence[str] = ()) -> Iterator[Outcome]:
    """Run all pairs, or those whose name contains one of `names`; each in its own process.

    Raises RuntimeError with the process's own words where one of them fails.
    """
    chosen = [pair for pair in PAIRS if not names or any(part in pair.name for part in names)]
    for pair in chosen:
        done = subprocess.run(
            [sys.executable, __file__, "--one", pair.name],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{pair.name}: {done.stderr.strip()[-2000:]}")
        yield Outcome(**json.loads(done.stdout.splitlines()[-1]))


def run_pair(pair: Pair) -> Outcome:
    """Record, predict, then measure. Runs in the process that `live_pairs` prepared."""
    import torch

    import foretrace as ft
    from foretrace.techniques.arguments import parse_all
    from live_models import JOBS, Arm, Training

    torch.set_num_threads(1)
    free = [_wait_for_cores()]
    job, before, after = JOBS[pair.job], Arm(), Arm(**pair.change)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        with ft.record(folder) as recorder:
            steps = Training(job, before).steps(loaded=pair.loaded)
            while not recorder.over:
                next(steps)
                recorder.step()
        answer = ft.read(folder).graph().apply(*parse_all(pair.do)).whatif()

    arms = {"before": Training(job, before), "after": Training(job, after), "again": Training(job, before)}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    discarded, counted, blocks = pair.block(answer.before_s)
    order = list(arms)
    for _ in range(blocks):
        for name in order:
            steps = arms[name].steps(loaded=pair.loaded)
            for _ in range(discarded):
                next(steps)
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in range(counted):
                next(steps)
            wall[name].append((time.perf_counter() - began) / counted)
            cpu[name].append((time.process_time() - began_cpu) / counted)
            steps.close()
        order = order[1:] + order[:1]

    free.append(free_cores())
    stretch = statistics.median(w / c for w, c in zip(wall["before"], cpu["before"], strict=True))
    # Steps of one thread that wait for nothing take as long as they compute, whatever else the machine does.
    clock = "wall" if pair.loaded else "cpu"
    times = wall if clock == "wall" else cpu
    ratios = sorted(b / a for a, b in zip(times["before"], times["after"], strict=True))
    same = sorted(abs(b / a - 1) for a, b in zip(times["before"], times["again"], strict=True))
    return Outcome(
        name=pair.name,
        do=pair.do,
        before_s=statistics.median(times["before"]),
        after_s=statistics.median(times["after"]),
        predicted=answer.after_s / answer.before_s,
        predicted_low=answer.interval_s[0] / answer.before_s,
        predicted_high=answer.interval_s[1] / answer.before_s,
        measured=statistics.median(ratios),
        measured_p10=ratios[len(ratios) // 10],
        measured_p90=ratios[-1 - len(ratios) // 10],
        same=same[-1 - len(same) // 10],
        clock=clock,
        wall_over_cpu=stretch,
        free_cores=min(free),
    )


def free_cores(seconds: float = 0.4) -> float:
    """How many cores this process and others of ours would get: two spin side by side, their CPU time is counted."""
    spin = (
        "import time\n"
        f"end = time.perf_counter() + {seconds}\n"
        "while time.perf_counter() < end: pass\n"
        "print(time.process_time())"
    )
    bare = [sys.executable, "-S", "-E", "-c", spin]
    spinning = [subprocess.Popen(bare, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(each.communicate()[0]) for each in spinning) / seconds


def _wait_for_cores(most_s: float = 60.0) -> float:
    """Wait until nothing else uses the cores, but not for ever; what is free then."""
    end = time.monotonic() + most_s
    while (free := free_cores()) < ENOUGH_CORES and time.monotonic() < end:
        time.sleep(5.0)
    return free


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--one"]:
        pair = next(pair for pair in PAIRS if pair.name == arguments[1])
        print(json.dumps(asdict(run_pair(pair))))
        return
    for outcome in live_pairs(arguments):
        print(
            f"{outcome.name}: predicted {outcome.predicted:.3f} "
            f"({outcome.predicted_low:.3f} – {outcome.predicted_high:.3f}), measured {outcome.measured:.3f} "
            f"({outcome.measured_p10:.3f} – {outcome.measured_p90:.3f}), error {outcome.error:+.1%}, "
            f"A/A {outcome.same:.1%}, {outcome.clock} clock, "
            f"wall / CPU {outcome.wall_over_cpu:.2f}, {outcome.free_cores:.1f} cores free"
            f"{', disturbed' if outcome.disturbed else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
