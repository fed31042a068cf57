"""`whatif`: stages, the interval and its sources, what is said about it."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import EdgeKind
from foretrace.techniques.arguments import parse_all
from foretrace.techniques.explain import main_parts, path_parts, why_not_more
from foretrace.techniques.selection import Remove, Scale
from foretrace.techniques.whatif import whatif
from tests.techniques.workloads import Cpu, Gpu


def test_no_technique_changes_nothing() -> None:
    prediction = whatif(Gpu().graph(), [])
    assert prediction.before_s == prediction.after_s
    assert prediction.stages == () and prediction.assumptions == () and prediction.changes == ()
    assert not prediction.critical_path_moved


def test_stages_sum_to_the_whole() -> None:
    prediction = whatif(
        Gpu().graph(), parse_all(["prefetch-data workers=2", "mixed-precision", "scale kind=cpu by=0.9"])
    )
    assert [stage.technique.name for stage in prediction.stages] == ["prefetch-data", "mixed-precision", "scale"]
    saved = sum(stage.saved_s for stage in prediction.stages)
    assert saved == pytest.approx(prediction.before_s - prediction.after_s)
    assert prediction.changes == prediction.after.graph.changes
    assert {change.technique for change in prediction.changes} >= {"prefetch-data", "mixed-precision", "scale"}


def test_the_interval_is_the_root_of_the_sum_of_squares() -> None:
    prediction = whatif(Gpu().graph(), parse_all(["prefetch-data", "fused-optimizer"]), level=0.9)
    low, high = prediction.interval_s
    assert low <= prediction.after_s <= high
    assert prediction.level == prediction.noise.level == 0.9
    faster = [each.faster_s for each in prediction.assumptions]
    assert prediction.after_s - low == pytest.approx(hypot(prediction.after_s - prediction.noise.low_s, *faster))
    assert prediction.assumptions, "there is something to assume"
    effect = [max(each.faster_s, each.slower_s) for each in prediction.assumptions]
    assert effect == sorted(effect, reverse=True)
    assert {each.assumption.technique for each in prediction.assumptions} == {"prefetch-data", "fused-optimizer"}


def test_an_assumption_is_weighed_through_the_whole_chain() -> None:
    graph = Gpu(host_us=60, kernel_us=5).graph()
    alone = whatif(graph, parse_all(["prefetch-data"]))
    followed = whatif(graph, parse_all(["prefetch-data", "scale kind=cpu by=0"]))
    contention = {each.assumption.flag: each.slower_s for each in alone.assumptions}
    assert contention["host_contention"] > 0
    after = {each.assumption.flag: each.slower_s for each in followed.assumptions}
    assert after["host_contention"] < 0.3 * contention["host_contention"]


def test_the_critical_path_moves_when_loading_is_hidden() -> None:
    prediction = whatif(Gpu(data_us=4000).graph(), parse_all(["prefetch-data host_contention=1 copy_contention=1"]))
    assert prediction.critical_path_moved
    assert "data loading" in main_parts(prediction.critical_path_before)
    assert "data loading" not in main_parts(prediction.critical_path_after)
    total = sum(part.time_s for part in path_parts(prediction.before))
    assert total == pytest.approx(prediction.before.window_ns / 1e9 / prediction.before.graph.n_steps)


def test_what_holds_the_step_is_said() -> None:
    launch_bound = whatif(Gpu(host_us=100, kernel_us=5, data_us=0).graph(), [Scale(kind="kernel", by=0.5)])
    assert "host work" in launch_bound.why_not_more
    assert "for launches" in launch_bound.stages[0].why_not_more
    busy = whatif(Gpu(host_us=1, kernel_us=500, data_us=0).graph(), [Scale(kind="cpu", by=0.5)])
    assert "kernels now" in busy.why_not_more and "launches" not in busy.why_not_more
    assert "operators" in why_not_more(whatif(Cpu(data_us=0).graph(), []).before)


def test_reasons_pass_through() -> None:
    with pytest.raises(NotApplicableError, match="no task fits name=nothing"):
        whatif(Gpu().graph(), [Scale(named="nothing", by=2)])
    with pytest.raises(NotApplicableError, match="choose tasks by"):
        whatif(Gpu().graph(), [Remove()])
    with pytest.raises(NotApplicableError, match="below 0"):
        whatif(Gpu().graph(), [Scale(named="*", by=-1)])


def test_device_questions_need_explained_delays() -> None:
    graph = Gpu().graph()
    unclear = replace(graph, info=replace(graph.info, unexplained_share=0.3))
    with pytest.raises(NotApplicableError, match="30% of the device's span later"):
        whatif(unclear, [Scale(kind="kernel", by=0.5)])
    assert whatif(unclear, [Scale(kind="cpu", by=0.5)]).after_s < whatif(unclear, []).after_s


def test_streams_that_no_longer_compete_are_let_go() -> None:
    graph = Gpu(data_us=0).graph()
    kernels = np.flatnonzero(graph.on_device & (graph.step == 1))
    # say that a late kernel held an early one up, as if on another stream: any order, here along the stream
    edge = int(np.flatnonzero((graph.dst == kernels[5]) & (graph.edge_kind == EdgeKind.STREAM))[0])
    kind = graph.edge_kind.copy()
    kind[edge] = EdgeKind.CONTENTION
    competing = graph.with_columns(edge_kind=kind)
    prediction = whatif(competing, [Scale(kind="kernel", by=1.0)])
    assert (prediction.after.graph.edge_kind == EdgeKind.CONTENTION).sum() == 1, "nothing changed, nothing is cut"
