"""`LaunchedPlan`: what a target needs of a plan; `InexpressiblePlanError`: what it has no words for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretrace.errors import ForetraceError
from foretrace.plan.transformers.model import NODE, Parallelism
from foretrace.plan.transformers.shape import TransformerSizes


class InexpressiblePlanError(Exception):
    """A target has no words for a part of a plan: `what`, and the `change` of the plan that it would take."""

    def __init__(self, what: str, change: str) -> None:
        super().__init__(what)
        self.what, self.change = what, change


@dataclass(frozen=True, kw_only=True)
class LaunchedPlan:
    """A model, how it is split, and samples per step. Raises ForetraceError where they do not fit together."""

    model: TransformerSizes
    at: Parallelism
    batch: int
    node: int = NODE  # devices of a machine

    def __post_init__(self) -> None:
        at = self.at
        if self.batch < 1 or self.batch % (at.data * at.micro):
            raise ForetraceError(
                f"batch must be a multiple of {at.data * at.micro} (data degree times micro-batch), got {self.batch}; "
                f"give {max(round(self.batch / (at.data * at.micro)), 1) * at.data * at.micro}."
            )
        if at.devices > self.node and at.devices % self.node:
            raise ForetraceError(
                f"devices must be a multiple of the {self.node} of a machine to be launched by torchrun, got "
                f"{at.devices}; give {round(at.devices / self.node) * self.node}."
            )
        if at.virtual > 1 and at.pipeline == 1:
            raise ForetraceError(f"virtual must be 1 where pipeline is 1, got {at.virtual}; give a pipeline degree.")
        if self.model.layers % (at.pipeline * at.virtual):
            raise ForetraceError(
                f"layers must be a multiple of {at.pipeline * at.virtual} stages, got {self.model.layers}; give "
                "degrees that divide them."
            )

    @property
    def nodes(self) -> int:
        """Machines that it runs on."""
        return max(self.at.devices // self.node, 1)

    @property
    def per_node(self) -> int:
        """Processes of a machine, one per device."""
        return min(self.at.devices, self.node)

    @property
    def per_replica(self) -> int:
        """Samples of a step for each data-parallel replica."""
        return self.batch // self.at.data

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step for each data-parallel replica."""
        return self.per_replica // self.at.micro

    @property
    def title(self) -> str:
        """What is launched, in a line."""
        return f"{self.model.name} on {self.at.devices} devices: {self.at}, {self.batch} samples per step"

    def without(self, *fields: str, at: str) -> None:
        """Refuse a plan that uses one of these fields of `Parallelism`; `at`: what the target does about them."""
        plain = Parallelism()
        for name in fields:
            value = getattr(self.at, name)
            if value != getattr(plain, name):
                raise InexpressiblePlanError(f"{name}={value} ({at})", f"fix {name}={getattr(plain, name)}")


def options(values: Mapping[str, object], join: str = " ") -> list[str]:
    """Return options as a command line has them: True is a flag alone, False and None are left out."""
    return [
        f"--{name}" if value is True else f"--{name}{join}{value}"
        for name, value in values.items()
        if value is not None and value is not False
    ]
