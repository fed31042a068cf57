"""`TechniqueConformance`: what every technique must do, as a class of tests to inherit from.

Predict keeps the graph valid and the original untouched, says what it did and assumed, gives the same answer twice,
composes with other techniques, and refuses with a reason where it does not fit. Apply leaves the original training
alone and gives one that trains, or says why it cannot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import EdgeKind, TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.selection import Scale
from foretrace.testing.workloads import Gpu, optimizer_facts

if TYPE_CHECKING:
    from foretrace.training.training import Training


def small_training() -> Training:
    """Return a small convolution network with batch norm, dropout and AdamW, on random pictures from a DataLoader."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from foretrace.training.training import Training

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5)),
    )
    data = TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(0, 5, (64,)))
    return Training(
        name="small",
        model=model,
        optimizers=(torch.optim.AdamW(model.parameters()),),
        loader=DataLoader(data, batch_size=16),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
    )


def recorded(training: Training, *, steps: int = 4) -> TaskGraph:
    """Return the graph of a few recorded steps of a training, for tests: no rehearsal, few neighbours."""
    from foretrace.flow import read
    from foretrace.training.recording import record_training

    with tempfile.TemporaryDirectory() as folder:
        record_training(training, folder, wait=2, active=steps, skip_first=1, rehearse=False)
        return read(Path(folder)).graph().graph


@lru_cache
def _recorded_once(make: Callable[[], Training]) -> TaskGraph:
    return recorded(make())


@lru_cache
def _on_gpu() -> TaskGraph:
    return Gpu(recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph()


class TechniqueConformance:
    """Tests of one technique; set `technique`, and `make_training` where the small network is not what it is for."""

    technique: ClassVar[Technique]
    make_training: ClassVar[Callable[[], Training]] = staticmethod(small_training)

    def graphs(self) -> Mapping[str, TaskGraph]:
        """Return recordings to predict on: `make_training`'s on this machine's processor, and one of a GPU."""
        return {"cpu": _recorded_once(type(self).make_training), "gpu": _on_gpu()}

    def test_describes_itself(self) -> None:
        kind = type(self.technique)
        assert kind.name == kind.name.lower() and " " not in kind.name
        assert kind.summary and "\n" not in kind.summary, "one line"
        assert kind.source, "paper and section, or documentation"
        for each in kind.parameters():
            assert each.doc, f"parameter {each.name} says what it is"
            assert each.type in ("float", "int", "bool", "str"), f"parameter {each.name} can be given as text"
        assert kind.can_apply() or kind.not_applied, "it can be applied, or says why it cannot"

    def test_is_written_as_it_is_read(self) -> None:
        assert parse(str(self.technique)) == self.technique

    def test_refuses_quantities_below_zero(self) -> None:
        for each in fields(self.technique):
            if "larger_is" not in each.metadata:
                continue
            try:
                replace(self.technique, **{each.name: -1.0})
            except NotApplicableError as reason:
                self._check_reason(reason)
            else:
                raise AssertionError(f"{each.name}=-1 is no quantity; call Technique.__post_init__ in your own")

    def test_fits_somewhere(self) -> None:
        assert self._predictions(), "no graph is one that it fits; override graphs() or make_training"

    def test_predict_keeps_graphs_valid_and_says_what_it_did(self) -> None:
        for name, graph, after in self._predictions():
            check_valid(after)
            assert len(after.marks) == len(graph.marks), f"{name}: as many steps as before"
            made = after.changes[len(graph.changes) :]
            assert made and all(change.what for change in made), f"{name}: says what it changed"
            assert sum(change.tasks for change in made) > 0, f"{name}: touched a task"
            assert {change.technique for change in made} <= {self.technique.name, ""}
            assert simulate(after).step_time_s >= 0

    def test_predict_leaves_the_original_alone_and_is_deterministic(self) -> None:
        for name, graph in self.graphs().items():
            before = _bytes(graph)
            first = self._predict(graph)
            assert _bytes(graph) == before, f"{name}: the graph given was altered"
            second = self._predict(graph)
            assert (first is None) == (second is None), name
            assert first is None or second is None or _bytes(first) == _bytes(second), f"{name}: not the same twice"

    def test_every_assumption_can_be_replaced(self) -> None:
        for name, graph, after in self._predictions():
            for assumption in self.technique.uncertain(graph):
                assert assumption.low <= assumption.value <= assumption.high, assumption
                assert assumption.why and assumption.technique == self.technique.name, assumption
                given = replace(self.technique, **{assumption.flag: assumption.value})
                assert assumption.flag not in {each.flag for each in given.uncertain(graph)}, assumption
                assert _bytes(given.predict(graph)) == _bytes(after), f"{name}: {assumption.flag} at its central value"

    def test_composes(self) -> None:
        half = Scale(phase="backward", by=0.5)
        for _, graph, after in self._predictions():
            check_valid(half.predict(after))
            try:
                check_valid(self.technique.predict(half.predict(graph)))
            except NotApplicableError as reason:
                self._check_reason(reason)

    def test_says_why_where_it_does_not_fit(self) -> None:
        for platform in ("cpu", "gpu"):
            nothing = self.graphs()[platform] if platform in self.graphs() else _on_gpu()
            bare = nothing.with_columns(
                gone=np.ones_like(nothing.gone), dur=np.zeros_like(nothing.dur), flops=np.zeros_like(nothing.flops)
            )
            try:
                after = self.technique.predict(bare)
            except NotApplicableError as reason:
                self._check_reason(reason)
            else:
                assert simulate(after).step_time_s >= 0

    def test_wants_the_same_operators_twice(self) -> None:
        for _, graph in ((name, graph) for name, graph, _ in self._predictions()):
            assert self.technique.wants(graph) == self.technique.wants(graph)

    def test_apply_gives_a_training_that_trains(self) -> None:
        import torch

        training = type(self).make_training().with_batches(2)
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        loader, optimizers = training.loader, training.optimizers
        try:
            treated = self.technique.apply(training)
        except NotApplicableError as reason:
            self._check_reason(reason)
            return
        assert type(self.technique).can_apply()
        assert treated is not training and treated.applied == (*training.applied, str(self.technique))
        losses = [float(loss) for loss in treated.steps(3)]
        assert len(losses) == 3 and all(np.isfinite(losses)), losses
        assert training.loader is loader and training.optimizers is optimizers and training.applied == ()
        after = list(training.model.parameters())
        assert len(after) == len(before), "the original model was altered"
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the original was trained"
        trained = {
            id(p) for optimizer in treated.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        assert {id(p) for p in treated.model.parameters() if p.requires_grad} <= trained, (
            "the optimizer lost parameters"
        )

    def _predict(self, graph: TaskGraph) -> TaskGraph | None:
        """Return the prediction, None where the technique refuses (with a good reason)."""
        try:
            return self.technique.predict(graph)
        except NotApplicableError as reason:
            self._check_reason(reason)
            return None

    def _predictions(self) -> list[tuple[str, TaskGraph, TaskGraph]]:
        found = ((name, graph, self._predict(graph)) for name, graph in self.graphs().items())
        return [(name, graph, after) for name, graph, after in found if after is not None]

    def _check_reason(self, reason: NotApplicableError) -> None:
        text = str(reason)
        assert text.startswith(f"{self.technique.name}: ") and text.endswith("."), f"no reason in a sentence: {text}"


def check_valid(graph: TaskGraph) -> None:
    """Assert that columns fit together, every edge leads forward, and lanes with an order are chains."""
    assert graph.in_ptr[0] == 0 and graph.in_ptr[-1] == graph.edges and np.all(np.diff(graph.in_ptr) >= 0)
    assert len(graph.in_ptr) == len(graph) + 1
    dst = graph.dst
    assert np.all(graph.src < dst), "an edge leads backward"
    assert np.all(graph.dur >= 0) and np.all(graph.delay >= 0), "a task takes less than no time"
    assert graph.name.max() < len(graph.names) and graph.lane.max() < len(graph.lanes)
    assert graph.shape.max() < len(graph.shapes) or not len(graph.shapes)
    along = np.isin(graph.edge_kind, (EdgeKind.PROGRAM, EdgeKind.STREAM)) & (graph.lane[graph.src] == graph.lane[dst])
    for number, lane in enumerate(graph.lanes):
        rows = np.flatnonzero(graph.lane == number)
        order = along & (graph.lane[dst] == number)
        before = set(zip(graph.src[order].tolist(), dst[order].tolist(), strict=True))
        chained = all(pair in before for pair in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True))
        assert chained or not lane.ordered, f"the order of {lane.label or f'lane {number}'} is broken"


def _bytes(graph: TaskGraph) -> dict[str, bytes]:
    """Return everything in a graph that could be spoiled."""
    keys = [key for key in graph.__dataclass_fields__ if isinstance(getattr(graph, key), np.ndarray)]
    return {key: getattr(graph, key).tobytes() for key in keys}
