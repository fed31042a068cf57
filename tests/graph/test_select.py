"""Selectors: what they choose, and what they say of a wrong word."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import GraphError
from foretrace.graph.edit import remove
from foretrace.graph.select import glob, select
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from tests.graph.small_graphs import STREAM_A, STREAM_B, Recording


@pytest.fixture
def graph() -> TaskGraph:
    recording = Recording()
    recording.mark()
    for _ in range(2):
        recording.work(10)
        recording.launch(STREAM_A, "gemm", 20)
        recording.launch(STREAM_B, "relu", 5, Phase.BACKWARD)
        recording.synchronise()
        recording.mark()
    return recording.graph()


def test_conditions_combine(graph: TaskGraph) -> None:
    assert select(graph, kind="kernel").sum() == 4
    assert select(graph, kind="kernel", step=1).sum() == 2
    assert select(graph, kind=TaskKind.KERNEL, phase="backward", step=[0, 1]).sum() == 2
    assert select(graph, kind="device").sum() == 4
    assert (select(graph, kind="host") | select(graph, kind="device")).all()
    assert select(graph, lane="stream 2?").sum() == 2 == select(graph, lane=STREAM_B).sum()
    assert select(graph, device=0).sum() == 4 and select(graph, device=1).sum() == 0
    assert select(graph, phase=Phase.BACKWARD).sum() == 2


def test_patterns_are_globs_over_the_whole_name(graph: TaskGraph) -> None:
    assert select(graph, name="gemm").sum() == 2
    assert select(graph, name="gem").sum() == 0
    assert select(graph, name="GEM*").sum() == 2
    assert select(graph, name="GEM*", ignore_case=False).sum() == 0
    assert select(graph, name=("gemm", "relu")).sum() == 4
    assert select(graph, op="*").sum() == 0, "no operator known: nothing fits, not even everything"
    assert glob("f<int>[a]*").fullmatch("f<int>[a](char*)")


def test_gone_tasks_are_never_chosen(graph: TaskGraph) -> None:
    assert select(remove(graph, select(graph, name="gemm")), kind="kernel").sum() == 2


def test_wrong_words_name_the_right_ones(graph: TaskGraph) -> None:
    with pytest.raises(GraphError, match=r"kind=kernels does not exist; choose from cpu, .*device, host\."):
        select(graph, kind="kernels")
    with pytest.raises(GraphError, match=r"phase=fwd does not exist; .*forward"):
        select(graph, phase="fwd")


def test_masks_are_boolean_rows(graph: TaskGraph) -> None:
    mask = select(graph)
    assert mask.dtype == np.bool_ and mask.shape == (len(graph),)
