"""`StageVersions`: one stage with as many sets of parameters as its schedule needs, and its optimizer.

Version k of the weights is in set k mod V. An update copies the newest set into the oldest and steps there, so a batch
that still runs on an older version is untouched: writing in place raises autograd's version counters, and a backward
pass on weights that were overwritten too early raises. Exchanging `p.data` instead would give wrong gradients silently.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretrace.training.pipeline.job import PipelineJob

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class StageVersions:
    """Layers of a stage in `versions` sets; buffers belong to no version and are shared by all."""

    def __init__(self, job: PipelineJob, stage: int, versions: int, device: torch.device) -> None:
        self.job, self.first = job, job.layers_of(stage)[0]
        newest = nn.ModuleList(job.built(layer) for layer in job.layers_of(stage)).to(device).train()
        shared: dict[int, Any] = {id(each): each for each in newest.buffers()}
        self.sets = [newest, *(copy.deepcopy(newest, dict(shared)) for _ in range(versions - 1))]
        self.names = [
            f"{self.first + int(at)}.{path}" for at, _, path in (n.partition(".") for n, _ in newest.named_parameters())
        ]
        self.parameters = [list(each.parameters()) for each in self.sets]
        self.optimizer = job.optimizer(self.parameters[0])
        self.statistics = any(isinstance(each, _BATCH_NORM) for each in newest.modules())

    def run(self, version: int, x: Tensor, micro_batch: int) -> Tensor:
        """Return forward pass on a version of the weights."""
        return self.job.run(list(self.sets[version % len(self.sets)]), self.first, x, micro_batch)

    def take(self, version: int) -> list[Tensor | None]:
        """Return the gradients of a version's set, which has none afterwards: the next batch may run on it."""
        mine = self.parameters[version % len(self.sets)]
        found = [each.grad for each in mine]
        for each in mine:
            each.grad = None
        return found

    def advance(self, newest: int, gradients: Sequence[Tensor | None] | None) -> None:
        """Make version `newest` + 1 from these gradients; None leaves the weights as they are."""
        old, new = (self.parameters[version % len(self.sets)] for version in (newest, newest + 1))
        if new is not old:
            with torch.no_grad():
                for target, source in zip(new, old, strict=True):
                    target.copy_(source)
            self._hand_over(old, new)
        if gradients is not None:
            for parameter, gradient in zip(new, gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            for parameter in new:
                parameter.grad = None

    def weights(self, version: int) -> dict[str, Tensor]:
        """Return copies of a version's parameters by layer and name."""
        mine = self.parameters[version % len(self.sets)]
        return {name: each.detach().clone() for name, each in zip(self.names, mine, strict=True)}

    def nbytes(self) -> int:
        """Return bytes of the weights in all versions, and of the optimizer's state."""
        states = (each for state in self.optimizer.state.values() for each in state.values())
        tensors = [p for some in self.parameters for p in some] + [each for each in states if isinstance(each, Tensor)]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    def state(self) -> dict[str, Any]:
        return {"sets": [each.state_dict() for each in self.sets], "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any], newest: int) -> None:
        """Set the stage to a kept state whose newest version this is."""
        for mine, kept in zip(self.sets, state["sets"], strict=True):
            mine.load_state_dict(kept)
        self._hand_over(self.parameters[0], self.parameters[newest % len(self.sets)])
        self.optimizer.load_state_dict(state["optimizer"])

    def _hand_over(self, old: Sequence[nn.Parameter], new: Sequence[nn.Parameter]) -> None:
        """Give the optimizer another set of parameters with the state of the old one."""
        twin = dict(zip(old, new, strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [twin[each] for each in group["params"]]
        for parameter, other in twin.items():
            if parameter in self.optimizer.state:
                self.optimizer.state[other] = self.optimizer.state.pop(parameter)
