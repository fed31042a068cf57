"""What cannot be asked of `plan rows`, `plan cache` and `plan data`: one sentence, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Cli

IDS, LINK, MEMORY = "zipf:1 tables=2 rows=50 samples=8 batches=8", ("--link", "50mbit"), ("--memory", "100MB")
GRAPH = "planted:nodes=100 edges=300 communities=4"
EDGES = np.array([[0, 1], [1, 2], [2, 2], [5, 5]])  # self loops, and node 3 alone
FILES = {  # by name: arrays, or bytes
    "junk.npz": b"PK\x03\x04" + b"x" * 99,
    "empty.npz": b"",
    "junk.parquet": b"PAR1 nothing PAR1",
    "reuse.txt": b"no histogram",
    "negative.npz": {"a.ids": np.array([-1, 2] * 8)},
    "broken.npz": {"a.ids": np.array([0.5, 2] * 8)},
    "objects.npz": {"a.ids": np.array([{}, 2] * 8, dtype=object)},
    "offsets.npz": {"a.ids": np.arange(16), "a.offsets": np.array([0, 3, 2, 16])},
    "no_ids.npz": {"x": np.arange(3)},
    "no_edges.npz": {"x": np.zeros((3, 2))},
    "few_nodes.npz": {"edges": EDGES, "nodes": np.array(3)},
    "many_nodes.npz": {"edges": EDGES, "nodes": np.array(2**40)},
    "below.npz": {"edges": EDGES - 1},
    "triples.npz": {"edges": np.zeros((5, 3), int)},
    "labels.npz": {"edges": EDGES, "label": np.zeros(3, int), "x": np.zeros((6, 2), np.float32)},
    "sets.npz": {"edges": EDGES, "train_idx": np.array([99])},
    "alone.npz": {"edges": np.zeros((0, 2), int), "nodes": np.array(5)},
}
BAD: dict[str, list[tuple[str, ...]]] = {
    "rows": [
        ("zipf:x",), ("zipf:nan",), ("zipf:1 tables=0",), ("zipf:1 foo=1",), ("zipf:1 tables",), ("zipf:1 rows=0",),
        ("zipf:1 rows=1000000000000 tables=1",), ("zipf:1 samples=100000000000",), ("zipf:1 seed=-1",),
        ("zipf:1 rows=criteo tables=30",), ("zipf:1 locality=2",), ("",), ("missing.npz",), ("junk.npz",),
        ("empty.npz",), ("junk.parquet",), ("negative.npz",), ("broken.npz",), ("objects.npz",), ("offsets.npz",),
        ("no_ids.npz",), (IDS, "--memory", "nan"), (IDS, "--memory", "0"), (IDS, "--memory=-1GB"),
        (IDS, "--devices", "0"), (IDS, "--width", "0"), (IDS, "--out", "/nowhere/x.npz"), ("zipf:1 batches=1",),
    ],
    "cache": [
        (IDS, "--trainers", "9", *LINK), (IDS, "--trainers", "0", *LINK), (IDS, "--look-ahead", "0", *LINK),
        (IDS, "--link", "slow"), (IDS, "--link", "0mbit"), (IDS, "--optimizer", "adam", *LINK),
        (IDS, "--optimizer", "sgd rate=nan", *LINK), (IDS, "--optimizer", "sgd rate=inf", *LINK),
        (IDS, "--compute-ms", "nan", *LINK), (IDS, "--compute-ms", "-1", *LINK), ("reuse:missing.txt", *LINK),
        ("reuse:reuse.txt", *LINK), ("zipf:1 batches=2", *LINK),
    ],
    "data": [
        ("missing.npz", *MEMORY), ("planted:nodes=1", *MEMORY), ("planted:foo", *MEMORY), ("planted:seed=-1", *MEMORY),
        ("planted:nodes=99999999999", *MEMORY), ("planted:edges=99999999999", *MEMORY), ("planted:edges=0", *MEMORY),
        ("planted:mixing=nan", *MEMORY), ("planted:communities=0", *MEMORY), (GRAPH, "--memory", "0"),
        (GRAPH, "--memory", "nan"), (GRAPH, "--memory", "5"), ("junk.npz", *MEMORY), ("no_edges.npz", *MEMORY),
        ("few_nodes.npz", *MEMORY), ("many_nodes.npz", *MEMORY), ("below.npz", *MEMORY), ("triples.npz", *MEMORY),
        ("labels.npz", *MEMORY), ("sets.npz", *MEMORY), ("alone.npz", *MEMORY), (".", *MEMORY),
        (GRAPH, "--task", "graphs", *MEMORY), (GRAPH, "--task", "nodes", *MEMORY), (GRAPH, "--batch", "0", *MEMORY),
        (GRAPH, "--sample", "0", *MEMORY), (GRAPH, "--sample", "2,2", "--run", *MEMORY),
        (GRAPH, "--run", "--epochs", "2", *MEMORY),
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", BAD)
def test_what_cannot_be_is_one_sentence(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    pytest.importorskip("torch", reason="plans trainings; install the extra torch")
    monkeypatch.chdir(tmp_path)
    for name, made in FILES.items():
        if isinstance(made, bytes):
            Path(name).write_bytes(made)
        else:
            np.savez(name, **made)  # type: ignore[arg-type]
    for words in BAD[command]:
        answer = cli("plan", command, *words)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), (words, answer.err)
        assert answer.err.rstrip().endswith((".", "--help.")) and len(answer.err) < 400, words
