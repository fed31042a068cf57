"""Reads and writes of rows are tasks of a recorded training, so that what-ifs see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foretrace as ft
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
    less = parse("remove name=rows.get*").predict(graph)
    assert simulate(less).step_time_s < simulate(graph).step_time_s
