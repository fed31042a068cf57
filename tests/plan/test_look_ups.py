"""plan look-ups: which products a model has, settings as text, and the choice."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from foretrace.cost.accelerators.product_quantised import MeasuredQuantisation, Surroundings
from foretrace.errors import ForetraceError
from foretrace.model.operator_graph import OperatorGraph
from foretrace.plan.look_ups import layer_products, plan_look_ups, setting
from foretrace.zoo.operators import operators_of
from tests.cli.test_real_traces import foretrace


def graph(name: str) -> OperatorGraph:
    return operators_of(name, size="tiny", batch=1, training=False)


def measured(text: str) -> MeasuredQuantisation:
    return setting(text, dense=0.94, samples=2500, bits=8)


def test_products_are_those_with_weights_behind_the_first() -> None:
    products, share = layer_products(graph("resnet50"))
    assert sum(each.count for each in products) == 53 and 0.5 < share < 1
    assert all(each.rows > 0 for each in products)
    separable, kept = layer_products(graph("mobilenet-v2"))
    assert kept < share and 9 not in {each.inputs for each in separable}, "depthwise convolutions stay"


def test_the_choice_keeps_the_accuracy_asked_for() -> None:
    settings = [measured("9/4/l1=0.80"), measured(" 9/16/L1=0.935"), measured("9/16/l2=0.938")]
    found = plan_look_ups(graph("resnet50"), settings, most_loss=0.01, around=Surroundings(all_on_chip=True))
    assert found.choice is not None and found.choice.design.measured == settings[1]
    assert [each.fits for each in found.candidates] == [False, True, True]
    low, high = found.choice.loss_interval
    assert low < found.choice.loss < high and found.choice.loss == pytest.approx(0.005)
    assert plan_look_ups(graph("resnet50"), settings[:1], most_loss=0.01).choice is None


@pytest.mark.parametrize(
    "text", ["9/16=0.9", "9/16/l3=0.9", "9/16/l1", "0x9/16/l1=.9", "9/16/l1=.9.1", "9/0/l1=0.9", "9/16/l1=2"]
)
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(ForetraceError):
        measured(text)
    with pytest.raises(ForetraceError, match="given twice"):
        plan_look_ups(graph("resnet50"), [measured("9/16/l1=0.9"), measured("9/16/l1=0.8")])


def test_the_command_shows_no_gain_without_its_accuracy() -> None:
    words = (
        "plan look-ups resnet50 --size tiny --setting 9/16/l1=0.935 --setting 9/8/l1=0.9 --dense 0.94 --samples 2500"
    )
    found = foretrace(*words.split(), "--json").json
    assert [each["fits"] for each in found["candidates"]] == [False, True]
    for each in found["candidates"]:
        design = each["design"]
        assert design["over_dense_interval"][0] <= design["over_dense"] <= design["over_dense_interval"][1]
        assert {"accuracy", "dense", "length", "prototypes", "distance"} <= design["measured"].keys()
    assert "loses 0.5 points" in foretrace(*words.split()).out


_SCRIPT = """
import torch
from torch import nn
from foretrace.training.training import Training

def training():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(576, 4))
    return Training(
        name="mine", model=model, optimizers=(torch.optim.SGD(model.parameters(), 0.1),),
        loader=[torch.randn(6, 3, 8, 8) for _ in range(2)], loss=lambda model, batch: model(batch).square().mean(),
    )
"""


def test_a_script_with_a_list_of_batches(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(_SCRIPT)
    words = ("plan", "look-ups", str(path), "--setting", "9/16/l1=0.935", "--dense", "0.94", "--samples", "2500")
    found = foretrace(*words, "--json").json
    assert found["layers"] == 2 and found["choice"] is not None
    products, _ = layer_products(operators_of(str(path), training=False))
    assert [(each.rows, each.inputs, each.outputs) for each in products] == [(36, 72, 16), (1, 576, 4)]
