"""structured-dropout: which tasks of a recorded LSTM it takes, what they become, and what it puts in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from foretrace.cost.operators.bench import measure
from foretrace.cost.operators.calibration import Calibration
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.compute.structured_dropout import StructuredDropout, places
from foretrace.testing import TechniqueConformance, recorded
from foretrace.training.structured_lstm import DropoutLSTM, StructuredDropoutLSTM
from foretrace.training.training import Training

TIME, BATCH, INPUT, HIDDEN = 6, 4, 24, 32


class Tagger(torch.nn.Module):
    """Two LSTM layers and a linear one on [batch, time, input]."""

    def __init__(self, lstm: torch.nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm
        self.out = torch.nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.lstm(x)[0])
        return scores


def job(connections: str = "both", *, wanted: bool = True) -> Training:
    torch.manual_seed(0)
    model = Tagger(DropoutLSTM(INPUT, HIDDEN, 2, p=0.5, connections=connections, batch_first=True))
    data = torch.utils.data.TensorDataset(torch.randn(64, TIME, INPUT), torch.randint(3, (64, TIME)))
    return Training(
        name="tagger",
        model=model,
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3),),
        loader=torch.utils.data.DataLoader(data, batch_size=BATCH),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(
            model(batch[0].requires_grad_(wanted)).flatten(0, 1), batch[1].flatten()
        ),
    )


@lru_cache
def graph(connections: str = "both", wanted: bool = True) -> TaskGraph:
    return recorded(job(connections, wanted=wanted), steps=3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestConformance(TechniqueConformance):
    technique = StructuredDropout(p=0.5)
    make_training: ClassVar[Callable[[], Training]] = staticmethod(partial(job))


def test_every_part_is_found_in_every_step() -> None:
    found = places(graph())
    steps = len(graph().marks) - 1
    count = Counter((place.part.what, place.part.connection) for place in found)
    connections, parts = ("input", "recurrent"), ("draw", "forward", "backward", "weight")
    assert set(count) == {(part, connection) for part in parts for connection in connections}
    assert set(count.values()) <= {2 * steps, 2 * steps + 2}, "two layers a step; the last step may be cut"
    rows = np.concatenate([place.rows for place in found])
    assert len(rows) == len(set(rows.tolist())), "no task belongs to two parts"


def test_products_and_masks_of_each_part() -> None:
    names = graph().names
    ops = {
        (place.part.what, place.part.connection): Counter(names[graph().op[row]] for row in place.rows)
        for place in places(graph())
    }
    assert ops["forward", "recurrent"] == {"aten::mul": TIME, "aten::addmm_": TIME}
    assert ops["backward", "recurrent"] == {"aten::mm": TIME, "aten::addcmul_": TIME}
    assert ops["backward", "input"] == {"aten::mm": 1, "aten::mul_": 1}
    assert ops["weight", "input"] == ops["weight", "recurrent"] == {"aten::mm": 1}
    assert ops["forward", "input"]["aten::mul"] == 1 and ops["forward", "input"]["aten::addmm"] >= 1
    assert set(ops["draw", "input"]) >= {"aten::uniform_", "aten::lt_", "aten::mul_"}


def test_sizes_of_parts() -> None:
    units = {(place.part.connection, place.part.units) for place in places(graph())}
    assert units == {("input", INPUT), ("input", HIDDEN), ("recurrent", HIDDEN)}
    assert {(p.part.time_steps, p.part.batch, p.part.gates) for p in places(graph())} == {(TIME, BATCH, 4 * HIDDEN)}


def test_input_that_needs_no_gradient_has_no_part_for_it() -> None:
    plain = Counter((p.part.what, p.part.connection) for p in places(graph("both", False)))
    assert 2 * plain["backward", "input"] == plain["backward", "recurrent"]


def test_without_measurements_products_take_their_share() -> None:
    technique = StructuredDropout(p=0.65, efficiency=1.0)
    after = technique.predict(graph())
    for place in places(graph()):
        if place.part.what != "draw":
            np.testing.assert_allclose(after.dur[place.rows], 0.35 * graph().dur[place.rows], atol=1)
    rest = np.ones(len(graph()), dtype=bool)
    rest[np.concatenate([place.rows for place in places(graph())])] = False
    assert np.array_equal(after.dur[rest], graph().dur[rest]), "pointwise work and the rest stay"


def test_redrawing_within_a_sequence_is_known_from_measurements_only() -> None:
    with pytest.raises(NotApplicableError, match="span=2 costs is known from measurements only"):
        StructuredDropout(span=2).predict(graph())
    timed = measure(StructuredDropout(span=2).wants(graph()))
    assert StructuredDropout(span=2).predict(Calibration().extended(timed.seconds).on(graph()))


def test_measured_parts_are_used() -> None:
    technique = StructuredDropout(p=0.5)
    wanted = technique.wants(graph())
    timed = measure(wanted)
    assert not timed.failed and set(timed.seconds) == {each.key for each in wanted}
    seconds = {key: 2e-3 if '\\"span\\": null' in key else 1e-3 for key in timed.seconds}  # structured takes half
    known = Calibration().extended(seconds).on(graph())
    assert [each.flag for each in technique.uncertain(known)] == ["measured"]
    after = technique.predict(known)
    for place in places(known):
        np.testing.assert_allclose(after.dur[place.rows], 0.5 * known.dur[place.rows], atol=1)


def test_only_the_input() -> None:
    technique = StructuredDropout(connections="input")
    assert technique.predict(graph("input"))
    assert all('\\"connection\\": \\"input\\"' in each.text for each in technique.wants(graph()))
    with pytest.raises(NotApplicableError, match="recurrent connections; ask for connections=input"):
        StructuredDropout().predict(graph("input"))
    with pytest.raises(NotApplicableError, match="recurrent connections; ask for connections=input"):
        StructuredDropout().apply(job("input"))
    model: Any = technique.apply(job("both")).model
    assert model.lstm.structured == "input" and model.lstm.connections == "both"


def test_apply_takes_weights_and_optimizers_over() -> None:
    training = job()
    treated = StructuredDropout(p=0.25, span=2).apply(training)
    lstm = treated.model.get_submodule("lstm")
    assert isinstance(lstm, StructuredDropoutLSTM) and (lstm.p, lstm.span, lstm.batch_first) == (0.25, 2, True)
    for (name, a), (other, b) in zip(training.model.named_parameters(), treated.model.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b) and a is not b
    before = lstm.get_parameter("weight_hh_l1").detach().clone()
    list(treated.steps(2))
    assert not torch.equal(lstm.get_parameter("weight_hh_l1"), before), (
        "its parameters are those that the optimizer updates"
    )
    bare = replace(training, model=training.model.get_submodule("lstm"))
    assert isinstance(StructuredDropout().apply(bare).model, StructuredDropoutLSTM)


def test_where_it_does_not_fit() -> None:
    training = job()
    plain = replace(training, model=Tagger(torch.nn.LSTM(INPUT, HIDDEN, batch_first=True)))
    with pytest.raises(NotApplicableError, match="no LSTM with ordinary dropout"):
        StructuredDropout().apply(plain)
    with pytest.raises(NotApplicableError, match="no LSTM with ordinary dropout"):
        StructuredDropout().apply(StructuredDropout().apply(training))
    training.model.get_submodule("lstm").register_forward_hook(lambda *_: None)
    with pytest.raises(NotApplicableError, match="has hooks"):
        StructuredDropout().apply(training)
    for wrong in ({"p": 1.0}, {"p": 0.0}, {"span": -1}):
        with pytest.raises(NotApplicableError, match=r"^structured-dropout: .*[.]$"):
            StructuredDropout(**wrong)
