"""What techniques of communication really do: processes on this machine, over gloo."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from foretrace.errors import NotApplicableError
from foretrace.techniques.arguments import parse
from foretrace.testing import small_training
from foretrace.training.batches import Resident
from foretrace.training.data_parallel import Shared, need_group, shared_loader
from tests.gloo_workers import together
from tests.techniques.worker_process import STEPS, answers, make, weights

TOGETHER = "data-parallel workers={n} network=1gbit"


def single(batch_size: int) -> tuple[list[float], list[float]]:
    """Losses and weights of one process on the joined batches."""
    training = make(batch_size)
    return [float(each) for each in training.steps(STEPS)], weights(training.model)


TWO = {
    "plain": ["data-parallel"],
    "buckets": ["data-parallel bucket_mb=0.004 views=yes"],
    "list": ["data-parallel buckets_mb=0.002,0.006"],
    "unused": ["data-parallel unused=yes"],
    "micro": ["gradient-accumulation steps=4", "data-parallel"],
    "fused": ["data-parallel bucket_mb=0.001", "bucket-fusion"],
    "sharded": ["fully-sharded"],
    "kept": ["fully-sharded reshard=no blocks=Block"],
    "local": ["local-steps every=2"],
    "each": ["local-steps every=1"],
    "gaia": ["local-steps every=1 updates=gaia threshold=0"],
    "dgc": ["local-steps every=1 updates=dgc share=1"],
    "some": ["local-steps every=2 updates=gaia threshold=0.05"],
    "few": ["local-steps every=1 updates=dgc share=0.1"],
    "wrong": ["data-parallel-of-three"],
    "nothing": ["bucket-fusion"],
}


@pytest.fixture(scope="module")
def two() -> dict[str, list[dict[str, Any]]]:
    """Answers of two workers by case."""

    def written(text: str) -> str:
        if text == "data-parallel-of-three":
            return TOGETHER.format(n=3)
        if text.split(maxsplit=1)[0] in ("data-parallel", "fully-sharded", "local-steps"):
            return f"{text} workers=2 network=1gbit"
        return text

    cases = [
        {"techniques": [written(text) for text in texts], "count": name in ("micro", "plain")}
        for name, texts in TWO.items()
    ]
    found = together(answers, 2, cases)
    return dict(zip(TWO, map(list, zip(*found, strict=True)), strict=True))


@pytest.mark.parametrize("name", ["plain", "buckets", "list", "unused", "micro", "fused", "sharded", "kept"])
def test_workers_do_what_one_does_on_the_joined_batch(name: str, two: dict[str, list[dict[str, Any]]]) -> None:
    losses, expected = single(16)
    first, second = two[name]
    assert np.allclose(first["weights"], second["weights"], rtol=0, atol=1e-7)
    assert np.allclose(first["weights"], expected, rtol=1e-4, atol=1e-6)
    both = np.mean([first["losses"], second["losses"]], axis=0)
    assert np.allclose(both, losses, rtol=1e-4, atol=1e-5)
    assert not np.allclose(first["losses"], second["losses"]), "each worker has samples of its own"


def test_only_the_last_micro_batch_communicates(two: dict[str, list[dict[str, Any]]]) -> None:
    assert two["micro"][0]["calls"] == two["plain"][0]["calls"] == [0] * STEPS


def test_buckets_are_those_asked_for(two: dict[str, list[dict[str, Any]]]) -> None:
    from foretrace.techniques.distributed.data_parallel import DataParallel

    order = [each.numel() * 4 for each in _ready_order()]
    for name, options in (("buckets", {"bucket_mb": 0.004}), ("list", {"buckets_mb": "0.002,0.006"})):
        parts = DataParallel(workers=2, network="1gbit", **options).buckets(order)
        assert two[name][0]["buckets"] == ", ".join(str(sum(order[i] for i in part)) for part in parts)
    assert two["fused"][0]["buckets"] == str(sum(order))


def _ready_order() -> list[torch.Tensor]:
    training, order = make(), list[torch.Tensor]()
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(order.append)
    next(training.steps(1))
    return order


def test_shards_are_halves(two: dict[str, list[dict[str, Any]]]) -> None:
    whole = two["plain"][0]["held"]
    halves = [each["held"] for each in two["sharded"]]
    assert sum(halves) == whole and max(halves) < 0.6 * whole


def test_local_steps_agree_where_they_average_and_differ_from_one_batch(two: dict[str, list[dict[str, Any]]]) -> None:
    first, second = two["local"]
    # Averages are taken at the steps 0 and 2; the fourth step is a local one.
    assert not np.allclose(first["weights"], second["weights"], atol=1e-6)
    assert np.allclose(first["weights"], second["weights"], atol=0.2)
    assert first["losses"][-1] < 2.0


@pytest.mark.parametrize("name", ["gaia", "dgc"])
def test_sparse_updates_of_all_elements_are_averages(name: str, two: dict[str, list[dict[str, Any]]]) -> None:
    for worker, averaged in zip(two[name], two["each"], strict=True):
        assert np.allclose(worker["weights"], averaged["weights"], rtol=0, atol=1e-6)
        assert np.allclose(worker["losses"], averaged["losses"], rtol=0, atol=1e-6)
        assert worker["sent"] == 4 * STEPS * len(worker["weights"])


def test_sparse_updates_that_wait_act_on_the_own_model_with_gaia_only(two: dict[str, list[dict[str, Any]]]) -> None:
    whole = 4 * STEPS * len(two["few"][0]["weights"])
    assert two["few"][0]["sent"] == 2 * 4 * STEPS * round(0.1 * whole / 4 / STEPS)
    assert np.array_equal(two["few"][0]["weights"], two["few"][1]["weights"])
    assert not np.allclose(two["some"][0]["weights"], two["some"][1]["weights"], atol=1e-6)
    assert 0 < two["some"][0]["sent"] < whole / 2


def test_refusals_of_processes_are_sentences(two: dict[str, list[dict[str, Any]]]) -> None:
    assert two["wrong"][0]["refused"] == "data-parallel: 2 processes run, and workers=3."
    assert "apply data-parallel first" in two["nothing"][0]["refused"]


def test_two_levels_of_four_workers() -> None:
    levels = ["data-parallel workers=4 network=1gbit bucket_mb=0.004", "hierarchical-allreduce levels=2x2"]
    three = [levels[0], "hierarchical-allreduce levels=2x2x1"]
    found = together(answers, 4, [{"techniques": levels}, {"techniques": three}])
    losses, expected = single(32)
    for worker in found:
        assert np.allclose(worker[0]["weights"], expected, rtol=1e-4, atol=1e-6)
        assert "names no levels" in worker[1]["refused"]
    assert np.allclose(np.mean([worker[0]["losses"] for worker in found], axis=0), losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text", [TOGETHER.format(n=2), "fully-sharded workers=2 network=1gbit", "local-steps workers=2 network=1gbit"]
)
def test_without_processes_the_reason_is_given(text: str) -> None:
    with pytest.raises(NotApplicableError, match=r"there is no process group; start 2 processes"):
        parse(text).apply(small_training())


def test_a_group_of_another_size_is_refused(alone: None) -> None:
    with pytest.raises(NotApplicableError, match=r"x: 1 processes run, and workers=2\."):
        need_group("x", 2)


def test_samples_are_dealt_out() -> None:
    data = TensorDataset(torch.arange(24).float())

    def taken(loader: Any, rank: int) -> list[float]:
        return [float(x) for batch in shared_loader(loader, rank, 2) for x in batch[0]]

    plain = DataLoader(data, batch_size=4)
    assert sorted(taken(plain, 0) + taken(plain, 1)) == list(range(24))
    assert sorted((taken(plain, 0) + taken(plain, 1))[:4]) == [0, 2, 4, 6]
    shuffled = DataLoader(data, batch_size=4, shuffle=True)
    assert sorted(taken(shuffled, 0) + taken(shuffled, 1)) == list(range(24)) and taken(shuffled, 0) != taken(plain, 0)
    resident = Resident.taken_from(plain, 2)
    assert [float(x) for batch in shared_loader(resident, 1, 2) for x in batch[0]] == [1, 3, 5, 7, 9, 11, 13, 15]


def test_batches_of_other_loaders_are_dealt_out() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return (torch.tensor([float(i)]) for i in range(8))

    loader = shared_loader(DataLoader(Stream(), batch_size=2), 1, 2)
    assert isinstance(loader, Shared) and loader.batch_size == 2
    assert [float(x) for batch in islice(loader, 2) for x in batch] == [2, 3, 6, 7]


def test_a_step_of_its_own_and_a_part_called_past_the_wrapper_are_refused(alone: None) -> None:
    from dataclasses import replace

    from foretrace.training.data_parallel import in_replicas, sharing
    from foretrace.training.training import plain_step

    own = replace(small_training(), run=plain_step)
    with pytest.raises(NotApplicableError, match="step of its own"):
        sharing(own, "data-parallel")
    past = replace(small_training(), loss=lambda model, batch: model.get_submodule("0")(batch[0]).sum())
    with pytest.raises(NotApplicableError, match="data-parallel: the loss calls"):
        getattr(in_replicas(past, "data-parallel").model, "append")  # noqa: B009  # reading it is what is refused
