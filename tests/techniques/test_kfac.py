"""K-FAC predicted: shares of the work, messages, refusals; and made."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import pytest
import torch

from foretrace.cost.operators import bench
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.kfac import Kfac
from foretrace.techniques.distributed.recorded_layers import factored_layers
from foretrace.techniques.measuring import calibrated
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.training.second_order.factors import find_layers
from foretrace.training.second_order.timed import PARTS


@lru_cache
def alone() -> TaskGraph:
    return recorded(small_training())


@lru_cache
def parallel(workers: int) -> TaskGraph:
    return parse(f"data-parallel workers={workers} network=1gbit/50us waiting_ms=0").predict(alone())


class TestConformance(TechniqueConformance):
    technique: ClassVar[Technique] = Kfac()


def test_layers_are_those_of_the_model() -> None:
    """Name by name, with the sizes that the preconditioner itself finds."""
    assert [each.layer for each in factored_layers(alone())] == [
        layer for layer, _ in find_layers(small_training().model)
    ]


def test_rarer_updates_are_quicker() -> None:
    graph = alone()
    steps = [
        simulate(Kfac(factors_every=factors, inverses_every=inverses).predict(graph)).step_time_s
        for factors, inverses in ((1, 1), (1, 10), (10, 10), (10, 100))
    ]
    assert steps == sorted(steps, reverse=True) and simulate(graph).step_time_s < steps[-1]


@pytest.mark.parametrize(("fraction", "kinds"), [(0.25, {"factors", "gradients"}), (1.0, {"factors", "inverses"})])
def test_what_is_sent_follows_from_the_fraction(fraction: float, kinds: set[str]) -> None:
    changed = Kfac(fraction=fraction).predict(parallel(4))
    sent = {name.split()[1] for name in changed.names if name.startswith("K-FAC") and name.endswith("between workers")}
    assert sent == kinds
    shares = Kfac(fraction=fraction).shares(parallel(4))
    nbytes = {changed.names[changed.name[row]]: int(changed.nbytes[row]) for row in range(len(changed))}
    assert nbytes["K-FAC factors between workers"] == shares.traffic(0).factors


def test_the_work_is_timed_by_the_preconditioner_itself() -> None:
    """What `wants` asks for can be timed, and takes the place of the count of operations."""
    graph, technique = alone(), Kfac()
    found = calibrated(graph, [technique], bench.measure)
    assert len(found.seconds) == len(PARTS) and not found.failed
    assert "gflops" in technique.priors(graph) and set(technique.priors(found.graph)) == {"work", "layer_us"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("factors_every=0", "factors_every must be 1 or more, got 0; it is a number of steps."),
        ("damping=0", "damping must be above 0, got 0; 0.003 is usual."),
        ("decay=1", "decay must be 0 or more and below 1, got 1; 0.95 is usual."),
        ("clip=-1", "clip must be 0 or more, got -1; 0 is none."),
        ("fraction=2", "fraction must be one of 1 for 1 workers, got 2; choose one."),
        ("skip=zzz", "skip must name layers, got zzz; choose of 0, 3, 8, 11."),
        ("skip=*", "the model has no linear layer and no convolution that is trained."),
    ],
)
def test_what_cannot_be_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(NotApplicableError) as caught:
        parse(f"kfac {text}").predict(alone())
    assert str(caught.value) == f"kfac: {said}"


def test_messages_of_data_parallel_are_changed_before_it() -> None:
    changed = Kfac(fraction=0.5).predict(parallel(2))
    with pytest.raises(NotApplicableError, match="the messages are changed by kfac already; put it first"):
        parse("bucket-fusion cap_mb=5").predict(changed)
    with pytest.raises(NotApplicableError, match="gradients are preconditioned already"):
        Kfac().predict(changed)


def test_a_training_by_it_takes_other_steps() -> None:
    losses = []
    for technique in ("", "kfac inverses_every=1 clip=0.1"):
        torch.manual_seed(0)
        training = small_training()
        training = parse(technique).apply(training) if technique else training
        losses.append([float(each) for each in training.steps(4)])
    assert losses[0][0] == pytest.approx(losses[1][0]) and losses[0][3] != losses[1][3]
