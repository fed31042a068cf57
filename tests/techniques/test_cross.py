"""A sample of the cross of all techniques with all recordings; `benchmarks/cross.py` runs the whole of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import fields
from functools import lru_cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.errors import ForetraceError, GraphError, NotApplicableError
from foretrace.graph import insert
from foretrace.graph.edit import remove
from foretrace.graph.taskgraph import EdgeKind, TaskGraph
from foretrace.techniques import base
from foretrace.techniques.arguments import parse
from foretrace.techniques.registry import techniques
from foretrace.testing.workloads import Gpu, optimizer_facts
from tests.techniques.cross import Cell, full_queue, judge, maimed, settings

HERE = Path(__file__).parents[1]
RECORDINGS = sorted((HERE / "data").glob("*.json.gz"))
SHARED = (  # a full launch queue, a loader in another process, inference, AMD, work of earlier steps
    "traces/kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz",
    "traces/tracelens/inference_vllm_decode_full_graph_execution.json.gz",
    "traces/tracelens/mi300_resnet_act_checkpoint.json.gz",
    "traces/hta/critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz",
)
ALL = [text for kind in techniques().values() for text in settings(kind)]


def holds(graph: TaskGraph, *texts: str) -> Cell:
    """The cell, which is not wrong."""
    cell = judge(graph, [parse(text) for text in texts])
    assert cell.outcome != "wrong", f"{' + '.join(texts)}: {cell.says}"
    return cell


@lru_cache
def recorded(path: Path) -> TaskGraph:
    run = flow.read(path)
    try:
        return run.graph().graph
    except GraphError:  # hardly any of its only step is the step's: techniques must bear what it holds all the same
        return run.graph(as_recorded=True).graph


@lru_cache
def on_gpu() -> TaskGraph:
    return Gpu(steps=4, recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph()


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".")[0])
def test_own_recordings(path: Path) -> None:
    cells = [holds(recorded(path), text) for text in ALL]
    assert any(cell.outcome == "sound" for cell in cells)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpu", "mixed-precision"),
        ("gpu", "channels-last"),
        ("cnn", "activation-compression min_bytes=1000"),
        ("decode", "speculative-decoding draft=0.1ms"),
    ],
)
def test_what_is_changed_already_does_not_change_again(name: str, text: str) -> None:
    graph = on_gpu() if name == "gpu" else recorded(HERE / "data" / f"{name}.json.gz")
    once = parse(text).predict(graph)
    with pytest.raises(NotApplicableError, match="in this graph already; give it once"):
        parse(text).predict(once)


@pytest.mark.parametrize("way", maimed)
def test_recordings_that_tell_less(way: str) -> None:
    """Each technique in one of its settings on a processor, in the other on a device."""
    on_processor, on_device = (maimed[way](graph) for graph in (recorded(RECORDINGS[0]), on_gpu()))
    for text in ALL[::2]:
        holds(on_processor, text)
    for text in ALL[1::2]:
        holds(on_device, text)


@pytest.mark.parametrize("name", SHARED, ids=lambda name: Path(name).name[:30])
def test_shared_recordings(shared_data: Path, name: str) -> None:
    graph = recorded(shared_data / name)
    for text in ALL:
        holds(graph, text)


@pytest.mark.parametrize("kind", techniques().values(), ids=lambda kind: kind.name)
def test_numbers_that_nobody_should_give(kind: type[base.Technique]) -> None:
    """A number is refused by name, or leads to a sound graph; a quantity below 0 is always refused."""
    graph, quantities = recorded(RECORDINGS[0]), {each.name for each in fields(kind) if "larger_is" in each.metadata}
    for each in kind.parameters():
        if each.type not in ("int", "float"):
            continue
        words = [word for word in settings(kind)[0].split() if not word.startswith(f"{each.name}=")]
        for value in ("-1", "0", "1e9" if each.type == "float" else f"{10**12}", f"{10**30}"):
            try:
                technique = parse(" ".join([*words, f"{each.name}={value}"]))
            except ForetraceError as error:
                assert each.name in str(error)
            else:
                assert value != "-1" or each.field not in quantities
                cell = judge(graph, [technique])
                assert cell.outcome != "wrong", f"{technique}: {cell.says}"


@pytest.mark.parametrize("way", ["whole", "full queue"])
def test_pairs(way: str) -> None:
    graph = on_gpu() if way == "whole" else full_queue(on_gpu())
    couples = list(permutations([settings(kind)[0] for kind in techniques().values()], 2))
    for first, second in random.Random(13).sample(couples, 90):
        holds(graph, first, second)


@pytest.mark.parametrize("technique", ["mixed-precision", "activation-offload", "gradient-accumulation steps=2"])
def test_a_full_launch_queue_stays_one(shared_data: Path, technique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is inserted ahead of a slot moves it to a later task of the stream, and the rows follow."""
    graph = full_queue(recorded(shared_data / SHARED[0]))
    assert np.sum(graph.edge_kind == EdgeKind.QUEUE) > 5_000
    cell = holds(graph, technique)
    assert cell.outcome == "sound"
    assert cell.after_s < 2 * cell.before_s
    if technique == "mixed-precision":  # without the order restored, the check refuses what the insertion leaves
        monkeypatch.setattr(insert, "sound_rows", lambda graph: (graph, np.arange(len(graph))))
        monkeypatch.setattr(base, "sound", lambda graph: graph)
        assert "goes backward" in judge(graph, [parse(technique)]).says


def sampled() -> list[list[Cell]]:
    """A third of the settings on a processor and on a device."""
    return [[holds(graph, text) for text in ALL[::3]] for graph in (recorded(RECORDINGS[0]), on_gpu())]


def test_two_processes_agree() -> None:
    """Nothing of a prediction hangs on the order of a set or on what memory held before (poison, in this process)."""
    assert os.environ["FORETRACE_POISON"] == "1"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom tests.techniques.test_cross import sampled\nprint(sampled())"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": seed, "FORETRACE_POISON": "0"}
    command = [sys.executable, "-W", "error", "-c", code, str(HERE.parent)]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert there.strip() == repr(sampled())
    assert "sound" in there


def test_what_is_wrong_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge itself: a traceback, a cycle, an unsound graph and an impossible time are all found."""
    kind = type(parse("scale by=0.5"))
    graph = recorded(RECORDINGS[0])

    def predicts(change: object) -> Cell:
        monkeypatch.setattr(kind, "predict", change)
        return judge(graph, [parse("scale by=0.5")])

    def crashes(self: object, graph: TaskGraph) -> TaskGraph:
        raise IndexError("list index out of range")

    def cycle(self: object, graph: TaskGraph) -> TaskGraph:
        raise ForetraceError("the edges form a cycle through task 3 (x) and task 4 (y).")

    def backward(self: object, graph: TaskGraph) -> TaskGraph:
        return graph.with_columns(src=np.maximum(graph.src, len(graph) // 2))

    def nothing(self: object, graph: TaskGraph) -> TaskGraph:
        return remove(graph, np.ones(len(graph), dtype=np.bool_))

    says = [predicts(change) for change in (crashes, cycle, backward, nothing)]
    assert [cell.outcome for cell in says] == ["wrong"] * 4
    assert "IndexError: list index out of range (test_cross.py:" in says[0].says


def test_a_cycle_is_refused_in_words_and_counted_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = on_gpu()

    def back(self: object, graph: TaskGraph) -> TaskGraph:
        src = graph.src.copy()
        src[graph.in_ptr[6]] = 10
        return graph.with_columns(src=src)

    monkeypatch.setattr(type(parse("scale by=0.5")), "change", back)
    cell = judge(graph, [parse("scale by=0.5")])
    assert cell.outcome == "wrong"
    assert cell.says.endswith("would wait for each other.") and "cycle" not in cell.says
