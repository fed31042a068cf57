"""Reads and writes of rows are tasks of a recorded training, so that what-ifs see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foretrace as ft
from foretrace.graph.taskgraph import Phase
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.training.rows.rows import RowsInMemory


def test_rows_are_tasks_that_a_what_if_removes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    rows, ids = RowsInMemory(np.zeros((40_000, 64), np.float32)), np.arange(20_000)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ft.record(tmp_path / "run", wait=1, warmup=1, active=3, rehearse=False) as recorder:
        for _ in range(12):
            values = torch.from_numpy(rows.get(ids)).requires_grad_()
            model(values).square().mean().backward()
            assert values.grad is not None
            rows.add(ids, -values.grad.numpy())
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    graph = ft.read(tmp_path / "run").graph().graph
    names = [graph.names[each] for each in graph.name]
    assert {"rows.get 20000 x 64", "rows.put 20000 x 64"} <= set(names)
    of_rows = np.array([name.startswith("rows.") for name in names])
    assert graph.dur[of_rows].sum() > 0.1 * graph.dur.sum()
    assert rows.counters.gets == rows.counters.writes
    assert {graph.phase[i] for i, name in enumerate(names) if name.startswith("rows.get")} == {Phase.DATA}
    assert simulate(parse("remove name=rows.get*").predict(graph)).step_time_s < simulate(graph).step_time_s


def test_rows_that_a_loader_reads_are_data_loading_which_prefetching_hides(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    values = np.zeros((40_000, 64), np.float32)

    class Looked:
        """A batch of looked-up rows per item."""

        def __init__(self) -> None:
            self.rows = RowsInMemory(values)

        def __len__(self) -> int:
            return 12

        def __getitem__(self, item: int) -> object:
            return torch.from_numpy(self.rows.get(np.random.default_rng(item).integers(0, 40_000, 100_000)))

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ft.record(tmp_path / "run", wait=1, warmup=1, active=4, rehearse=False) as recorder:
        for batch in torch.utils.data.DataLoader(Looked(), batch_size=None):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    graph = ft.read(tmp_path / "run").graph().graph
    of_rows = np.array([graph.names[each].startswith("rows.get") for each in graph.name])
    assert of_rows.any() and (graph.phase[of_rows] == Phase.DATA).all()
    hidden, removed = (parse(do).predict(graph) for do in ("prefetch-data workers=1", "remove name=rows.get*"))
    before, prefetched, without = (simulate(each).step_time_s for each in (graph, hidden, removed))
    assert without < before and prefetched < before
