"""sparse-accelerator: which convolutions it takes, by measured and by stated zeros, and what it refuses."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from foretrace.cost.accelerators.sparse import SparseArray
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.report import models as report
from foretrace.report.jsonout import dumps
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.classes import WorkClass, classify
from foretrace.techniques.whatif import whatif
from foretrace.testing import TechniqueConformance, recorded
from foretrace.training.sparsity import samples
from foretrace.training.training import Training


def job(norm: bool = False, side: int = 12) -> Training:
    torch.manual_seed(0)
    between = [nn.BatchNorm2d(16)] if norm else []
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *between, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, padding=1),
        *([nn.BatchNorm2d(24)] if norm else []), nn.ReLU(), nn.Flatten(), nn.Linear(24 * (side // 2) ** 2, 4),
    )  # fmt: skip
    batches = [(torch.randn(8, 3, side, side), torch.randint(4, (8,)))] * 4

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(name="small", model=model, optimizers=(optimizer,), loader=batches, loss=loss)


@lru_cache
def graph(norm: bool = False) -> TaskGraph:
    return recorded(job(norm), steps=3)


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    array = SparseArray(lanes=4)
    taken = [report.sample(each, array) for each in samples(job(), (0, 3))]
    found = report.sparsity(taken, model="m", size="", array=array, images=8, exact=True, unchecked="")
    path = tmp_path_factory.mktemp("masks") / "masks.json"
    path.write_text(dumps(found))
    return path


def shares(before: TaskGraph, after: TaskGraph) -> tuple[float, float]:
    """What is left of the time of convolutions, forward and backward."""
    conv = classify(before).work == WorkClass.CONV
    assert (after.dur[~conv] == before.dur[~conv]).all()
    parts = [conv & (before.phase == phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    return tuple(float(after.dur[each].sum() / before.dur[each].sum()) for each in parts)  # type: ignore[return-value]


class TestSparseAccelerator(TechniqueConformance):
    technique: ClassVar[Technique] = parse("sparse-accelerator input=0.5±0.1 gradient=0.4")

    make_training = staticmethod(job)


def test_more_stated_zeros_take_less_time() -> None:
    found = [
        shares(graph(), parse(f"sparse-accelerator input={zeros} gradient={zeros} array=lanes=2").predict(graph()))
        for zeros in (0, 0.3, 0.6, 0.9)
    ]
    assert found[0] == pytest.approx((1, 1), abs=0.02)
    assert all(more[1] < less[1] for less, more in pairwise(found))
    # Pictures have no zeros, so the first convolution takes all of its time forward, and its weights' gradient most.
    conv = np.flatnonzero((classify(graph()).work == WorkClass.CONV) & (graph().dur > 0))
    left = parse("sparse-accelerator input=0.9 gradient=0.9 array=lanes=2").predict(graph()).dur / graph().dur.clip(1)
    assert left[conv].max() == 1 and left[conv].min() < 0.25


def test_a_stated_range_widens_the_interval() -> None:
    sure, unsure = (
        whatif(graph(), [parse(f"sparse-accelerator input={text} gradient=0.6 array=lanes=2")])
        for text in ("0.5", "0.5±0.2")
    )
    assert {each.assumption.flag for each in sure.assumptions} >= {"cycles"}
    weighed = {each.assumption.flag: each for each in unsure.assumptions}
    assert (weighed["input_zeros"].assumption.low, weighed["input_zeros"].assumption.high) == (0.3, 0.7)
    assert weighed["input_zeros"].faster_s > 0 and weighed["input_zeros"].slower_s > 0


def test_measured_masks_give_each_layer_its_share(masks: Path) -> None:
    conv = classify(graph()).work == WorkClass.CONV
    before = graph().with_columns(dur=np.where(conv, 1_000_000, graph().dur))
    left = parse(f"sparse-accelerator masks={masks}").predict(before).dur[conv] / 1e6
    layers = zip(*(step["layers"] for step in json.loads(masks.read_text())["samples"]), strict=True)
    forward, backward = [], []
    for steps in layers:
        sums = [[sum(each[side].values()) for each in steps] for side in ("sparse", "dense")]
        ahead = [[each[side]["forward"] for each in steps] for side in ("sparse", "dense")]
        forward.append(sum(ahead[0]) / sum(ahead[1]))
        backward.append((sum(sums[0]) - sum(ahead[0])) / (sum(sums[1]) - sum(ahead[1])))
    assert max(backward) < 0.9
    back = before.phase[conv] == Phase.BACKWARD
    for mine, shares in ((~back, forward), (back, backward)):
        assert sorted(set(left[mine].tolist())) == pytest.approx(sorted(min(each, 1) for each in shares), abs=2e-6)
    prior = parse(f"sparse-accelerator masks={masks}").priors(graph())["cycles"]
    assert prior.low < 0.9 and prior.high > 1.1


def test_behind_batch_norm_what_remains_is_said() -> None:
    after = parse("sparse-accelerator input=0.5 gradient=0").predict(graph(norm=True))
    assert any("batch norm makes output gradients dense; what remains:" in each.what for each in after.changes)
    with pytest.raises(NotApplicableError, match=r"next to a batch norm, .* dense; state gradient=0\."):
        parse("sparse-accelerator input=0.5 gradient=0.7").predict(graph(norm=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "state zeros by input= and gradient="),
        ("input=half", "half is no share of zeros"),
        ("input=1.2", "1.2 is no share of zeros"),
        ("input=0.5 array='lanes=0'", "array: lanes must be above 0"),
        ("input=0.5 masks=x.json", "one of the two"),
        ("masks=none.json", "cannot read none.json"),
        ("masks={masks} array='lanes=8'", "array= is that of the file"),
    ],
)
def test_refusals_are_sentences(text: str, said: str, masks: Path) -> None:
    with pytest.raises(NotApplicableError, match=r"^sparse-accelerator: .*\.$") as error:
        parse(f"sparse-accelerator {text.format(masks=masks)}").predict(graph())
    assert said in str(error.value)


def test_masks_of_another_model_and_graphs_without_convolutions_are_refused(masks: Path) -> None:
    with pytest.raises(NotApplicableError, match="measure the model that was recorded, in the same size"):
        parse(f"sparse-accelerator masks={masks}").predict(recorded(job(side=10), steps=2))
    with pytest.raises(NotApplicableError, match="shows no convolution"):
        bare = graph().with_columns(gone=classify(graph()).work == WorkClass.CONV)
        parse("sparse-accelerator input=0.5").predict(bare)
