"""product-quantisation: which products of a recorded inference it takes, what they become, and the real thing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from foretrace.cost.operators.bench import measure
from foretrace.cost.operators.calibration import Calibration
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.product_quantisation import ProductQuantisation, recorded_products
from foretrace.testing import TechniqueConformance, recorded, small_training
from foretrace.training.product_quantised import ProductQuantised
from foretrace.training.training import Training


def forward(training: Training, batch: Any) -> Tensor:
    """A step of inference."""
    training.model.eval()
    with torch.no_grad():
        found: Tensor = training.model(batch).mean()
    return found


def job() -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.Conv2d(8, 16, 3, stride=2, padding="valid"), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 64),
        nn.Linear(64, 64),
    ).requires_grad_(False)  # fmt: skip
    batches = [torch.randn(8, 3, 12, 12) for _ in range(4)]
    return Training(
        name="inference", model=model, optimizers=(), loader=batches, loss=lambda model, x: model(x).mean(), run=forward
    )


@lru_cache
def graph() -> TaskGraph:
    return recorded(job(), steps=3)


class TestProductQuantisation(TechniqueConformance):
    technique: ClassVar[Technique] = ProductQuantisation(prototypes=8)

    make_training = staticmethod(job)
    test_composes = None  # type: ignore[assignment]  # scales a backward pass, which inference has not: see below


def test_every_product_of_one_group_is_found_with_its_sizes() -> None:
    found = recorded_products(graph())
    sizes = [(8 * 144, 27, 8), (8 * 25, 72, 16), (8, 64, 64), (8, 64, 64)]
    assert [(each.rows, each.inputs, each.outputs) for each in found] == sizes * graph().n_steps


def test_all_but_the_first_layer_change_alike_layers_too() -> None:
    found = [each.row for each in recorded_products(graph())]
    for text, first in (("first=true", 0), ("", 1)):
        after = parse(f"product-quantisation prototypes=8 {text}").predict(graph())
        changed = set(np.flatnonzero(after.dur != graph().dur).tolist())
        assert changed == {row for i, row in enumerate(found) if i % 4 >= first}


def test_prediction_is_the_difference_of_both_forms_timed_alone() -> None:
    technique = ProductQuantisation(prototypes=8)
    wanted = technique.wants(graph())
    assert len(wanted) == 4 and not measure(wanted, target_s=0.002).failed
    known = Calibration(seconds={each.key: 1e-6 if each.concrete[-1] == "plain" else 5e-5 for each in wanted})
    on = known.on(graph())
    after = technique.predict(on)
    rows = [each.row for i, each in enumerate(recorded_products(on)) if i % 4]
    assert np.array_equal(after.dur[rows] - on.dur[rows], np.full(len(rows), 49_000))
    assert set(technique.priors(on)) == {"measured"} and set(technique.priors(graph())) == {"counted"}


def test_what_is_counted_is_wide() -> None:
    (each,) = ProductQuantisation().uncertain(graph())
    assert each.high / each.low > 5


@pytest.mark.parametrize(("text", "says"), [
    ("length=0", "length must be 1 or more"), ("prototypes=0", "prototypes must be 1 or more"),
    ("prototypes=129", "129 prototypes need as many samples, and a layer meets 128 in the 16 batches"),
])  # fmt: skip
def test_refuses_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(NotApplicableError, match=says):
        parse(f"product-quantisation {text}").predict(graph())


def test_refuses_trainings_and_too_few_samples() -> None:
    with pytest.raises(NotApplicableError, match="shows a backward pass"):
        ProductQuantisation().predict(recorded(small_training(), steps=2))
    with pytest.raises(NotApplicableError, match="its step trains"):
        ProductQuantisation().apply(small_training())
    with pytest.raises(NotApplicableError, match="prototypes need as many samples"):
        ProductQuantisation(prototypes=5000).apply(job())


def test_applied_it_looks_up_and_the_original_stays() -> None:
    plain = job()
    changed = ProductQuantisation(prototypes=8).apply(plain)
    kinds = [type(each) for each in changed.model.children()]
    assert kinds.count(ProductQuantised) == 3 and kinds[0] is nn.Conv2d
    assert not any(isinstance(each, ProductQuantised) for each in plain.model.modules())
    assert all(bool(torch.isfinite(loss)) for loss in changed.steps(2))


def test_composes_with_other_changes_of_inference() -> None:
    quantised, half = ProductQuantisation(prototypes=8), parse("scale op=aten::clamp_min by=0.5")
    one, other = half.predict(quantised.predict(graph())), quantised.predict(half.predict(graph()))
    assert np.array_equal(one.dur, other.dur)
