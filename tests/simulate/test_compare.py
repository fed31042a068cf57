"""`compare`: which task is which, and what every layer has to do with the difference."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.graph import edit
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.simulate.compare import Comparison, LayerDifference, compare
from foretrace.simulate.timeline import simulate
from foretrace.trace.trace import LaneKind

LAYERS = ("conv", "norm", "head")


def chain(names: list[str], layers: list[int], dur: list[int]) -> TaskGraph:
    """Kernels on one stream between two marks; one layer and one duration each."""
    n = len(names)
    table = tuple(dict.fromkeys([*names, "mark"]))
    number = [table.index(name) for name in [*names, "mark", "mark"]]
    order = [n, *range(n), n + 1]
    return assemble(
        {
            "kind": np.array([TaskKind.KERNEL] * n + [TaskKind.MARK] * 2),
            "lane": np.zeros(n + 2),
            "name": np.array(number),
            "layer": np.array([*layers, -1, -1]),
            "phase": np.array([Phase.FORWARD] * n + [Phase.NONE] * 2),
            "step": np.array([0] * n + [-1, -1]),
            "dur": np.array([*dur, 0, 0]),
            "recorded": np.array([*range(1, n + 1), 0, n + 1]),
        },
        {
            "src": np.array(order[:-1]),
            "dst": np.array(order[1:]),
            "edge_kind": np.full(n + 1, EdgeKind.STREAM),
            "lag": np.zeros(n + 1),
        },
        marks=np.array([n, n + 1]),
        names=table,
        layers=LAYERS,
        lanes=(Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7),),
        info=GraphInfo(platform="cuda", steps=(0,)),
    )


BEFORE = chain(["gemm", "bn", "gemm", "sgemm"], [0, 1, 0, 2], [400, 100, 600, 50])


def compared(after: TaskGraph) -> tuple[Comparison, dict[str, LayerDifference]]:
    found = compare(simulate(BEFORE), simulate(after))
    assert sum(row.critical_before_ns for row in found.rows) == found.before_ns
    assert sum(row.critical_after_ns for row in found.rows) == found.after_ns
    return found, {row.layer: row for row in found.rows}


def test_the_same_run_differs_nowhere() -> None:
    found, rows = compared(BEFORE)
    assert found.matched_share == 1.0
    assert all(row.matched and not row.changed and not row.replaced for row in rows.values())


def test_a_faster_layer_explains_the_difference() -> None:
    _, rows = compared(chain(["gemm", "bn", "gemm", "sgemm"], [0, 1, 0, 2], [200, 100, 300, 50]))
    assert (rows["conv"].before_ns, rows["conv"].after_ns, rows["conv"].changed) == (1000, 500, 2)
    assert rows["norm"].changed == rows["head"].changed == 0


def test_rows_are_ranked_by_their_part_in_the_difference() -> None:
    found, _ = compared(chain(["gemm", "bn", "gemm", "sgemm"], [0, 1, 0, 2], [390, 50, 600, 20]))
    assert [row.layer for row in found.rows] == ["norm", "head", "conv"]


def test_another_librarys_kernel_is_a_replacement() -> None:
    found, rows = compared(chain(["gemm", "bn", "gemm", "hmma"], [0, 1, 0, 2], [400, 100, 600, 20]))
    assert (rows["head"].matched, rows["head"].replaced, rows["head"].only_before) == (1, 1, 0)
    assert found.matched_share == 1.0


def test_a_layer_that_is_gone_is_on_one_side_only() -> None:
    found, rows = compared(chain(["gemm", "gemm", "sgemm"], [0, 0, 2], [400, 600, 50]))
    assert (rows["norm"].only_before, rows["norm"].after_ns, rows["norm"].matched) == (1, 0, 0)
    assert found.matched_share == pytest.approx((1050 + 1050) / (1150 + 1050))


def test_removed_tasks_of_a_prediction_count_as_gone() -> None:
    _, rows = compared(edit.remove(BEFORE, BEFORE.layer == 1))
    assert (rows["norm"].only_before, rows["norm"].after_ns) == (1, 0)
