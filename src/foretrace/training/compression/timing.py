"""Hooks as something to be timed alone: the real hook on a bucket of the recorded shapes, without other workers.

The messages are answered at once by a group that stands in for the others, so that encoding and decoding remain: all of
it, or what happens before the hook returns if nothing is ever answered. In gathering methods the stand-in gives as
many answers as there are workers, because decoding grows with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

from foretrace.cost.operators.operator import Operator
from foretrace.training.compression.settings import Boundary, CompressionSettings

ENCODE, DECODE, ALL = "encode", "decode", "all"
GATHERING = frozenset(("topk", "sign", "dgc"))


def hook_operator(
    settings: CompressionSettings, shapes: Sequence[tuple[int, ...]], workers: int, part: str, device: str = "cpu"
) -> Operator:
    """Return a hook on a bucket of float32 gradients of these shapes; `part` is ENCODE or ALL."""
    known = asdict(settings) | {"start": 2, "warm_steps": 0}  # the steady state, whenever it sets in
    known |= {"part": part, "workers": workers if settings.method in GATHERING else 1, "device": device}
    text = json.dumps(known, sort_keys=True)
    dims: list[Any] = [[list(shape) for shape in shapes], []]
    return Operator.of(f"{__name__}:prepared_hook", dims, ["TensorList", ""], ["", text])


def prepared_hook(operator: Operator) -> Callable[[], object]:
    """Return what `hook_operator` stands for, ready to be called."""
    import torch

    from foretrace.training.compression.hooks import make_hook

    known = json.loads(operator.concrete[1])
    part, workers, device = known.pop("part"), known.pop("workers"), known.pop("device")
    settings = CompressionSettings(**known)
    torch.manual_seed(0)
    shapes = operator.dims[0]
    bucket = _bucket(torch.randn(sum(map(prod, shapes)), device=device), shapes)
    state, hook = make_hook(settings, stand_in(workers, answers=part == ALL))
    if settings.method == "powersgd":
        state.iter = state.start_powerSGD_iter
    return partial(hook, state, bucket)


def _bucket(buffer: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """Return a bucket of gradients of these shapes that no reducer made."""
    parts = zip(buffer.split(list(map(prod, shapes))), shapes, strict=True)
    gradients = [part.view(shape) for part, shape in parts]
    return SimpleNamespace(buffer=lambda: buffer, gradients=lambda: gradients, index=lambda: 0, is_last=lambda: True)


def stand_in(workers: int, *, answers: bool = True) -> Any:
    """Return a process group of so many workers, of whom the others answer what they are sent, or never."""
    from torch import distributed as dist

    from foretrace.training.compression.hooks import work

    base: Any = dist.ProcessGroup

    class StandIn(base):  # type: ignore[misc]  # of type Any
        """Answers what it is asked, with what was sent."""

        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            return work(tensors, done=answers)

        def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
            if answers:
                for each in outputs[0]:
                    each.copy_(inputs[0])
            return work(outputs, done=answers)

        def getBackendName(self) -> str:  # torch's name
            return "stand-in"

    return StandIn(0, workers)


def coding_operators(boundary: Boundary, rows: int, hidden: int, answers: int) -> tuple[Operator, Operator]:
    """Return encoding and decoding of an activation [rows, hidden]; `answers` codes are decoded and added up."""
    found = []
    for what in (ENCODE, DECODE):
        known = {"boundary": asdict(boundary), "rows": rows, "hidden": hidden, "answers": answers, "what": what}
        text = json.dumps(known, sort_keys=True)
        found.append(Operator.of(f"{__name__}:prepared_coding", [[rows, hidden], []], ["float", ""], ["", text]))
    return found[0], found[1]


def prepared_coding(operator: Operator) -> Callable[[], object]:
    """Return what `coding_operators` stand for, ready to be called."""
    from foretrace.training.compression import boundaries

    known = json.loads(operator.concrete[1])
    boundary = Boundary(**known["boundary"])
    return boundaries.coding(boundary, known["rows"], known["hidden"], known["answers"], encode=known["what"] == ENCODE)
