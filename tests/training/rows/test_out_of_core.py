"""Training on graphs in partitions: what it learns, what it takes, and how it goes on after an end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="trains; install the extra torch")

from msgspec.structs import replace

from foretrace.errors import ForetraceError
from foretrace.experiment.processes import limited
from foretrace.plan.data.plan import memory_of
from foretrace.training.rows import graphs, links, nodes, partitions
from foretrace.training.rows.disk import RowsOnDisk, read_whole
from foretrace.training.rows.out_of_core import TrainingJob, train
from foretrace.training.rows.partitions import GraphSizes
from foretrace.training.rows.rows import RowsInMemory
from foretrace.training.rows.samplers import NeighborLoader
from tests.training.rows.test_graphs import odd


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = graphs.planted(nodes=2_000, edges=20_000, communities=40, features=16, seed=1)
    return partitions.write(data, tmp_path / "graph", partitions=8).folder


def job(folder: Path, **changes: Any) -> TrainingJob:
    base = TrainingJob(folder=str(folder), task="links", loader="partition buffer", buffer=4, order="beta", batch=250)
    return replace(base, **changes)


def node_job(folder: Path, **changes: Any) -> TrainingJob:
    return job(folder, task="nodes", batch=50, rate=0.01, order="", **changes)


def test_links_are_learnt_alike_in_a_buffer_and_in_memory(folder: Path, tmp_path: Path) -> None:
    found = {}
    arms: dict[str, dict[str, Any]] = {
        "memory": {"loader": "in memory", "buffer": 0, "order": ""},
        "beta": {},
        "comet": {"order": "comet"},
    }
    for name, changes in arms.items():
        (tmp_path / name).mkdir()
        trained = train(job(folder, into=str(tmp_path / name), epochs=6, **changes))
        found[name] = trained.quality
        assert trained.epochs[-1].loss < trained.epochs[0].loss
        assert [each.swaps for each in trained.epochs] == [{"memory": 0, "beta": 9, "comet": 10}[name]] * 6
    assert min(found.values()) > 0.75
    assert max(found.values()) - min(found.values()) < 0.05


def test_all_partitions_at_once_are_memory_to_the_bit(folder: Path, tmp_path: Path) -> None:
    tables = []
    arms: dict[str, dict[str, Any]] = {"memory": {"loader": "in memory", "order": ""}, "buffer": {"buffer": 8}}
    for name, changes in arms.items():
        (tmp_path / name).mkdir()
        train(job(folder, into=str(tmp_path / name), epochs=2, **changes))
        tables.append(read_whole(tmp_path / name / "embeddings.rows"))
    np.testing.assert_array_equal(tables[0], tables[1])


def test_a_killed_training_goes_on_as_if_nothing_had_been(folder: Path, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    train(job(folder, into=str(tmp_path / "whole"), epochs=3))
    asked = job(folder, into=str(tmp_path / "killed"), epochs=3)
    code = (
        "import sys, os, signal, msgspec\n"
        "from foretrace.training.rows.out_of_core import TrainingJob, train\n"
        "from foretrace.training.rows import links\n"
        "job, count, step = msgspec.json.decode(sys.argv[1], type=TrainingJob), [0], links.step\n"
        "def counted(*given, **named):\n"
        "    count[0] += 1\n"
        "    if count[0] == 130:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(*given, **named)\n"
        "links.step = counted\n"
        "train(job)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, msgspec.json.encode(asked).decode()], check=False)
    assert done.returncode == -signal.SIGKILL
    table = tmp_path / "killed" / "embeddings.rows"
    with RowsOnDisk(table, buffer=0) as rows:
        assert rows.commits == 1  # an epoch has about 100 batches
    train(asked)
    np.testing.assert_array_equal(read_whole(table), read_whole(tmp_path / "whole" / "embeddings.rows"))


def test_a_step_is_what_autograd_says(folder: Path) -> None:
    import torch

    random = np.random.default_rng(0)
    values = random.standard_normal((30, 5)).astype(np.float32)
    values[:, -1] = 1.0
    heads, tails, others = random.integers(0, 30, (3, 40), np.int32)  # with self loops and nodes that come often
    rows = RowsInMemory(values.copy())
    found = links.step(rows, heads, tails, others, rate=0.5)
    table = torch.tensor(values[:, :4], dtype=torch.float64, requires_grad=True)
    head, tail, other = (table[torch.from_numpy(each).long()] for each in (heads, tails, others))
    loss = torch.nn.functional.softplus(-(head * tail).sum(1)) + torch.nn.functional.softplus((head * other).sum(1))
    loss.sum().backward()
    assert table.grad is not None
    gradient = table.grad.numpy()
    squares = 1.0 + (gradient**2).mean(1)
    assert found == pytest.approx(loss.sum().item(), rel=1e-5)
    np.testing.assert_allclose(rows.values[:, 4], squares, rtol=1e-5)
    np.testing.assert_allclose(
        rows.values[:, :4], values[:, :4] - 0.5 * gradient / np.sqrt(squares)[:, None], rtol=1e-3, atol=1e-5
    )


def test_auc_is_the_share_of_pairs() -> None:
    random = np.random.default_rng(0)
    good, bad = random.integers(0, 5, 40).astype(np.float64), random.integers(-1, 4, 30).astype(np.float64)
    wins = (good[:, None] > bad).sum() + 0.5 * (good[:, None] == bad).sum()
    assert links.auc(good, bad) == pytest.approx(wins / (40 * 30))


def test_nodes_are_classified_alike_in_a_buffer_and_in_memory(folder: Path) -> None:
    arms: tuple[dict[str, Any], ...] = ({"loader": "in memory"}, {})
    memory, buffer = (
        [train(node_job(folder, seed=seed, epochs=8, **changes)).quality for seed in range(3)] for changes in arms
    )
    assert min(*memory, *buffer) > 5 / 40
    assert abs(np.mean(memory) - np.mean(buffer)) < 0.1


def test_judging_reads_all_neighbours(folder: Path) -> None:
    import torch

    graph = partitions.read(folder)
    model = nodes.Sage((16, 8, graph.sizes.classes)).eval()
    everyone, features = np.arange(graph.sizes.nodes), torch.from_numpy(read_whole(graph.features))
    lists = nodes.neighbours_within(graph, tuple(range(8)))
    (read,) = NeighborLoader(lists, num_neighbors=(-1, -1), batch_size=len(everyone))
    with torch.no_grad():
        scores = model(features[torch.from_numpy(read.n_id)], read)
    expected = float((scores.argmax(1).numpy() == graph.labels).mean())
    with RowsOnDisk(graph.features, buffer=2) as rows:
        assert nodes.accuracy(graph, rows, model, everyone) == pytest.approx(expected, abs=2e-3)


def test_isolated_nodes_self_loops_and_empty_partitions_are_trained(tmp_path: Path) -> None:
    data = odd(9)
    folder = partitions.write(data, tmp_path / "graph", partitions=7, hold_out=False).folder  # of 2 nodes: 5 are used
    trained = train(job(folder, batch=2, epochs=2, buffer=3))
    assert np.isfinite(trained.epochs[-1].loss) and trained.quality == 0.0
    from dataclasses import replace as with_fields

    labelled = with_fields(
        data, features=np.eye(9, dtype=np.float32), labels=np.arange(9) % 2, train=np.array([0, 4]), test=np.array([6])
    )
    folder = partitions.write(labelled, tmp_path / "labelled", partitions=7, hold_out=False).folder
    assert train(node_job(folder, buffer=3, epochs=2)).quality in (0.0, 1.0)


def test_a_limit_is_enforced_and_the_planned_memory_suffices(folder: Path) -> None:
    sizes = partitions.read(folder).sizes
    asked = node_job(folder)
    memory = memory_of(asked, sizes, 200)
    trained = limited(train, asked, memory_bytes=memory)
    assert 0 < trained.peak_bytes <= memory
    assert trained.limit_bytes > memory
    with pytest.raises(ForetraceError, match="2 MB do not suffice"):
        limited(train, job(folder, batch=50_000), memory_bytes=2_000_000)


def test_memory_counts_buffer_and_temporaries() -> None:
    sizes = GraphSizes(nodes=1_000_000, edges=10_000_000, partitions=16, features=0, classes=0)
    base = TrainingJob(folder="", task="links", loader="partition buffer", buffer=4, order="beta", width=64)
    small, large = (memory_of(replace(base, batch=each), sizes, 0) for each in (5_000, 50_000))
    assert large - small > 8 * 45_000 * 64 * 4
    assert small > 5 * 1_000_000 / 16 * 65 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "nodes"}, "features and training nodes"),
        ({"buffer": 9}, "0 to 8"),
        ({"batch": 0}, "1 or more"),
        ({"order": "comet", "buffer": 3}, "multiples"),
    ],
)
def test_jobs_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    data = graphs.planted(nodes=100, edges=300, communities=4)
    folder = partitions.write(data, tmp_path / "graph", partitions=8).folder
    with pytest.raises(ForetraceError, match=words):
        train(job(folder, **changes))
