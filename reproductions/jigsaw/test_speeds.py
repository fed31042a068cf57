"""JigSaw's speeds in the cluster simulator: as fast as the iterations say, and more than packing alone."""

from __future__ import annotations

import pytest

from foretrace.fleet import policies
from foretrace.fleet.cluster import parse_cluster
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import ProportionalSpeeds
from foretrace.fleet.workload import SECOND, Workload
from reproductions.jigsaw.sharing import jigsaw_speeds
from reproductions.jigsaw.speeds import JigsawSpeeds
from reproductions.jigsaw.tasks import IterationJob


def jobs(work_s: list[float], models: str, gpus: list[int]) -> Workload:
    return Workload.of(submit_s=[0.0] * len(work_s), gpus=gpus, work_s=work_s, model=list(models))


def told(model: str, gpus: int) -> IterationJob:
    return IterationJob.of(
        name=model, workers=gpus, forward_s=0.1, backward_s=0.2, communication_s={"a": 0.02, "b": 0.1}[model]
    )


@pytest.mark.parametrize("partial", [True, False])
def test_jigsaw_runs_as_fast_as_its_iterations(partial: bool) -> None:
    speeds = JigsawSpeeds(base=ProportionalSpeeds(), tasks=told, partial=partial)
    work = jobs([1000, 1000], "ab", gpus=[2, 2])
    result = simulate(work, parse_cluster("1x2"), policies.make("jigsaw"), speeds=speeds)
    relative = jigsaw_speeds([told("a", 2), told("b", 2)], partial=partial).relative
    first, second = sorted(1000 / relative)
    assert result.end_ns.min() / SECOND == pytest.approx(first)
    alone = jigsaw_speeds([told("ab"[int(relative.argmin())], 2)], partial=partial).relative[0]
    assert result.end_ns.max() / SECOND == pytest.approx(first + (1000 - first * 1000 / second) / alone)
    assert speeds.pair(jobs([1, 1], "ab", gpus=[1, 2]), 0, 1) == 0  # gangs of unequal size


def test_jigsaw_adds_to_packing() -> None:
    work = jobs([1000] * 8, "abababab", gpus=[2] * 8)

    def mean(partial: bool) -> float:
        speeds = JigsawSpeeds(base=ProportionalSpeeds(), tasks=told, partial=partial)
        return float(simulate(work, parse_cluster("1x4"), policies.make("jigsaw"), speeds=speeds).jct_s.mean())

    turns = float(simulate(work, parse_cluster("1x4"), policies.make("fifo")).jct_s.mean())
    assert mean(True) < mean(False) < turns
