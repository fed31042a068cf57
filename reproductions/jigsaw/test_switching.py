"""Turning between jobs: state comes back unchanged, real processes take turns, the page says both figures."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from foretrace.experiment.statistics import Verdict
from reproductions.jigsaw import switching
from reproductions.jigsaw.switching import Parts, State, Swap, Switched, Turns


def test_state_leaves_and_comes_back_unchanged() -> None:
    convolution = torch.nn.Conv2d(3, 4, 3)
    convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(4))
    tensors = [*model.parameters(), *model.buffers()]
    before = [each.detach().clone() for each in tensors]
    swap = Swap([*tensors, tensors[0]])
    assert len(swap.tensors) == len(tensors) and swap.nbytes == sum(each.nbytes for each in before)
    swap.out()
    assert all(each.numel() == 0 for each in tensors), "it holds nothing of its own"
    swap.back()
    for mine, was in zip(tensors, before, strict=True):
        assert torch.equal(mine, was) and mine.stride() == was.stride()
    model(torch.ones(2, 3, 8, 8)).sum().backward()


def test_processes_take_turns() -> None:
    """Not one iteration of one job while the other is in one, in every way."""
    jobs = (switching._READS, switching._READS)
    with switching.pair() as both:
        for way in switching.WAYS:
            found = both.by_turns(jobs, way, 4)
            assert len(found.switches) == 6 and (found.switches > 0).all(), way
            assert min(found.iteration) > 0
        assert min(both.alone_s(jobs, 3)) > 0
        (state,) = both.workers.ask(
            switching.state_of, Turns(job=switching._READS, way="kept", turns=0), "", first=True
        )
        assert state == State(tensors=0, nbytes=0)


def test_a_prediction_is_what_its_parts_add_up_to() -> None:
    parts = Parts({"kept": (1.0, 0.5, 2.0), "swapped": (1.0, 0.5, 2.0)}, 0.1, 0.01, (0.8, 1.5))
    states = (State(tensors=10, nbytes=100), State(tensors=30, nbytes=300))
    assert parts.switch_s("kept", states) == (1.0, 0.5, 2.0)
    assert parts.switch_s("swapped", states) == pytest.approx((5.0, 3.7, 8.0))


def test_the_page_says_predicted_and_measured() -> None:
    state = State(tensors=1, nbytes=4_000_000)
    found = [
        Switched(
            jobs=("bert", "gpt2"), way=way, states=(state, state), alone_s=(0.1, 0.1), predicted_s=(0.01, 0.005, 0.02),
            rounds_s=(0.012, 0.0121, 0.0119), slower=(0.01, 0.02, 0.03), each_s=(0.01, 0.01, 0.01),
        )
        for way in switching.WAYS
    ]  # fmt: skip
    assert found[0].share == pytest.approx(0.14) and found[0].trial().verdict == Verdict.COVERED
    assert found[0].row().parameters["switch-jobs"]["share"] == pytest.approx(0.14)
    said = switching.section(found)
    assert (
        said.startswith(switching.MARKS[0])
        and "| bert + gpt2 | swapped | 4.0 | 100 | 10 (5 – 20) | 12 (12 – 12)" in said
    )
    shares = [
        float(line.split("|")[k].split("%")[0]) for line in said.splitlines()[-10:] if "| 2 |" in line for k in (4, 5)
    ]
    assert shares[0] > shares[1], "a switch that costs something takes from the gain"
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Switched]) == found
    assert np.isfinite(shares).all()
