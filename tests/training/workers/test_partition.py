"""Partitions lose no sample, and have the proportions that they state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.training.workers.partition import partition
from foretrace.training.workers.replica import Replica
from foretrace.zoo.partitioned import PartitionedJob

LABELS = np.repeat(np.arange(10), 60)


@given(
    text=st.sampled_from(["iid", "dirichlet alpha=0.5 least=1", "quantity", "pathological classes=2"]),
    workers=st.integers(5, 12), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_sample_is_in_one_partition(text: str, workers: int, seed: int) -> None:
    parts = partition(text, LABELS, workers, seed=seed)
    assert len(parts) == workers
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))


def test_partitions_have_their_proportions() -> None:
    assert [len(each) for each in partition("quantity", LABELS, 3)] == [100, 200, 300]
    for each in partition("pathological classes=2", LABELS, 5):
        assert len(set(LABELS[each].tolist())) == 2 and len(each) == 120
    own, shared = partition("pathological classes=1", LABELS, 20)[0], 30
    assert len(own) == shared
    even = partition("dirichlet alpha=10000", LABELS, 5)
    assert all(abs(np.mean(LABELS[each] == 3) - 0.1) < 0.03 for each in even)


@pytest.mark.parametrize(
    ("text", "workers", "words"),
    [("pathological classes=1", 5, "leave 5 of 10 labels out"), ("pathological classes=11", 5, "1 to 10"),
     ("dirichlet alpha=0", 5, "above 0"), ("dirichlet alpha=0.001 least=100", 5, "raise alpha"),
     ("iid", 601, "1 to 600"), ("patological", 5, "pathological"), ("quantity power=x", 5, "number")],
)  # fmt: skip
def test_what_cannot_be_dealt_out_is_one_sentence(text: str, workers: int, words: str) -> None:
    with pytest.raises(ForetraceError, match=words):
        partition(text, LABELS, workers)


def test_a_worker_without_samples_is_one_sentence() -> None:
    job = PartitionedJob()
    samples, labels = job.data(10, 0)
    with pytest.raises(ForetraceError, match="without samples"):
        Replica(job.model(), samples[:0], labels[:0], batch=4, rate=0.1, seed=0)
    with pytest.raises(ForetraceError, match="without samples"):
        PartitionedJob(workers=20, partition="dirichlet alpha=0.01 least=0", samples=100).replicas()
