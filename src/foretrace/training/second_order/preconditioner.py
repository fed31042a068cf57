"""`Preconditioner`: K-FAC between the backward pass and the optimizer, its work shared out over workers.

    preconditioner = Preconditioner(model, SecondOrderSettings(inverses_every=10))
    optimizer = Preconditioned(torch.optim.SGD(model.parameters(), lr=0.1), preconditioner)

Hooks take the factors while a layer runs. `step` then averages them over all workers, decomposes them where they are
due, preconditions gradients and bounds the length of the update (Ba et al., Distributed K-FAC, ICLR 2017). Nothing is
kept but running factors and inverses. Gradients must be the same on all workers, as DistributedDataParallel leaves
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.training.second_order.factors import find_layers, gradient_of, input_factor, output_factor, put_gradient
from foretrace.training.second_order.grid import share_out, triangle


@dataclass(frozen=True, kw_only=True)
class SecondOrderSettings:
    """What K-FAC does, and how often."""

    fraction: float = 1.0  # of the workers that precondition a layer
    factors_every: int = 1  # steps
    inverses_every: int = 10  # steps
    damping: float = 0.003  # added to every eigenvalue of a layer's curvature
    decay: float = 0.95  # of the running factors
    clip: float = 0.001  # bound of the update's length in the metric of the curvature; 0 is none
    scaling: str = "sample"  # of the factors, see `factors`
    skip: str = ""  # globs of layers that are left to the optimizer


class Preconditioner:
    """K-FAC on the layers of a model that have factors; `model` is the module inside DistributedDataParallel."""

    def __init__(self, model: nn.Module, settings: SecondOrderSettings, *, workers: int = 1, rank: int = 0) -> None:
        found = find_layers(model, settings.skip)
        if not found:
            raise NotApplicableError("the model has no linear layer and no convolution that is trained.")
        self.settings, self.rank, self.steps = settings, rank, 0
        self.modules = [module for _, module in found]
        self.shares = share_out([layer for layer, _ in found], workers=workers, fraction=settings.fraction)
        self.factors: dict[tuple[int, str], Tensor] = {}  # by layer and letter
        self.inverses: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by layer: eigenvectors of A and G, divisors
        self.sent = {"factors": 0, "inverses": 0, "gradients": 0}  # bytes that this worker handed to collectives
        self.failures = 0  # decompositions whose layer kept the inverse that it had
        self.new: dict[tuple[int, str], list[Tensor]] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._number = {module: i for i, module in enumerate(self.modules)}
        for module in self.modules:
            module.register_forward_hook(self._passed)

    @property
    def held_bytes(self) -> int:
        """Bytes of the storages that are kept between steps."""
        kept = [*self.factors.values(), *(each for found in self.inverses.values() for each in found)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
        return sum(storages.values())

    def state_dict(self) -> dict[str, Any]:
        """Return steps, running factors, and the inverses that this worker keeps."""
        return {"steps": self.steps, "factors": self.factors, "inverses": self.inverses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where this worker stopped. Raises ForetraceError for a state of other layers or shares."""
        sides = {(i, letter): side for i, each in enumerate(self.shares.layers)
                 for letter, side in (("A", each.inputs), ("G", each.outputs))}  # fmt: skip
        factors, inverses = state.get("factors", {0: ()}), state.get("inverses", {})
        if (factors and {key: len(each) for key, each in factors.items()} != sides) or (
            inverses and set(inverses) != set(self.shares.preconditions(self.rank))
        ):
            raise ForetraceError(
                "K-FAC's state must be what this worker saved, of the same layers, workers and fraction, got another "
                "one; begin again without it."
            )
        at = self.modules[0].weight.device
        self.steps = state["steps"]
        self.factors = {key: each.to(at, copy=True) for key, each in factors.items()}
        self.inverses = {i: (a.to(at, copy=True), g.to(at, copy=True), d.to(at, copy=True))
                         for i, (a, g, d) in inverses.items()}  # fmt: skip

    def _passed(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not (module.training and output.requires_grad) or self.steps % self.settings.factors_every:
            return
        number, scaling = self._number[module], self.settings.scaling
        with torch.no_grad():
            self.new.setdefault((number, "A"), []).append(input_factor(module, inputs[0], scaling))

        def ready(gradient: Tensor) -> None:
            self.new.setdefault((number, "G"), []).append(output_factor(module, gradient, scaling))

        output.register_hook(ready)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Precondition the gradients of a backward pass in place; `rate` is the optimizer's learning rate."""
        if self.new:
            self.update_factors()
        if self.factors and self.steps % self.settings.inverses_every == 0:
            self.update_inverses()
        self.update_gradients(rate)
        self.steps += 1

    def update_factors(self) -> None:
        """Let running factors follow those of the last pass, and average them over all workers."""
        decay = self.settings.decay
        if not self.factors:
            for i, (layer, module) in enumerate(zip(self.shares.layers, self.modules, strict=True)):
                self.factors[i, "A"], self.factors[i, "G"] = (
                    torch.eye(side, device=module.weight.device) for side in (layer.inputs, layer.outputs)
                )
        for key, found in self.new.items():
            new = found[0] if len(found) == 1 else torch.stack(found).mean(0)
            self.factors[key].mul_(decay).add_(new, alpha=1 - decay)
        self.new.clear()
        if self.shares.workers == 1:
            return
        waiting = list(self.factors.values())
        for sides in self.shares.buckets():
            bucket, waiting = waiting[: len(sides)], waiting[len(sides) :]
            packed = pack(bucket)
            dist.all_reduce(packed)
            self.sent["factors"] += packed.nbytes
            unpack(packed.div_(self.shares.workers), bucket)

    def update_inverses(self) -> None:
        """Decompose this worker's share of the factors, and send the result to the gradient workers."""
        shares = self.shares
        for i in shares.preconditions(self.rank):
            layer = shares.layers[i]
            if i not in self.inverses:  # one that leaves gradients as they are
                a, g = torch.eye(layer.inputs), torch.eye(layer.outputs)
                at = self.modules[i].weight.device
                self.inverses[i] = a.to(at), g.to(at), torch.ones(layer.outputs, layer.inputs, device=at)
        for i in shares.decomposes(self.rank):
            try:
                found = decompose(self.factors[i, "A"], self.factors[i, "G"], self.settings.damping)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                self.failures += 1
                why = str(error).partition("\n")[0]
                warnings.warn(
                    f"the factors of {shares.layers[i].name} cannot be decomposed in step {self.steps} ({why}); "
                    "it keeps the inverse that it had.", RuntimeWarning, stacklevel=2,
                )  # fmt: skip
                continue
            for old, new in zip(self.inverses[i], found, strict=True):
                old.copy_(new)
        if shares.sends_inverses:
            for source in shares.column(self.rank):
                each = [part for i in shares.decomposes(source) for part in self.inverses[i]]
                self.sent["inverses"] += self._broadcast(each, source, shares.column(self.rank))

    def update_gradients(self, rate: float) -> None:
        """Precondition all gradients in place."""
        plain = {i: gradient_of(each) for i, each in enumerate(self.modules) if each.weight.grad is not None}
        ready = {}
        for i in self.shares.preconditions(self.rank):
            if i in plain:
                ready[i] = precondition(plain[i], *self.inverses[i]) if i in self.inverses else plain[i].clone()
        self._send_gradients(plain, ready)
        scale = 1.0
        if self.settings.clip and plain:
            length = rate**2 * float(
                torch.stack([torch.vdot(ready[i].view(-1), plain[i].view(-1)) for i in plain]).sum()
            )
            scale = min(1.0, sqrt(self.settings.clip / abs(length))) if length else 1.0
        for i in plain:
            put_gradient(self.modules[i], ready[i], scale)

    def _send_gradients(self, plain: dict[int, Tensor], ready: dict[int, Tensor]) -> None:
        if not self.shares.sends_gradients:
            return
        for source in self.shares.row(self.rank):
            mine = [i for i in self.shares.preconditions(source) if i in plain]
            for i in mine:
                if i not in ready:
                    ready[i] = torch.empty_like(plain[i])
            self.sent["gradients"] += self._broadcast([ready[i] for i in mine], source, self.shares.row(self.rank))

    def _broadcast(self, tensors: Sequence[Tensor], source: int, ranks: tuple[int, ...]) -> int:
        """Give these tensors the values that they have at `source`; bytes of the message."""
        if not tensors:
            return 0
        flat = torch.cat([each.reshape(-1) for each in tensors])
        dist.broadcast(flat, source, group=self._group(ranks))
        if source != self.rank:
            for each, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
                each.copy_(part.view_as(each))
        return int(flat.nbytes)

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of these ranks; all groups are made at the first call, by all workers in
        one order.
        """
        if not self._groups:
            every = range(self.shares.workers)
            for each in dict.fromkeys([*map(self.shares.column, every), *map(self.shares.row, every)]):
                if len(each) > 1:
                    self._groups[each] = dist.new_group(list(each))
        return self._groups[ranks]


class Preconditioned:
    """An optimizer behind a `Preconditioner`; all else is asked of the optimizer itself."""

    def __init__(self, optimizer: Any, preconditioner: Preconditioner) -> None:
        self.optimizer, self.preconditioner = optimizer, preconditioner

    def step(self, closure: Any = None) -> Any:
        """Precondition, then update."""
        self.preconditioner.step(self.optimizer.param_groups[0]["lr"])
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's, and the preconditioner's."""
        return {**self.optimizer.state_dict(), "kfac": self.preconditioner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where it was saved; errors as of the preconditioner."""
        self.preconditioner.load_state_dict(state.get("kfac", {}))
        self.optimizer.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":  # while it is copied it has none yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def decompose(a: Tensor, g: Tensor, damping: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvectors of both factors, and 1 / (λ_g λ_a + damping) by output and input.

    Raises LinAlgError where a factor has no finite decomposition.
    """
    (values_a, vectors_a), (values_g, vectors_g) = torch.linalg.eigh(a), torch.linalg.eigh(g)
    if not (bool(torch.isfinite(values_a).all()) and bool(torch.isfinite(values_g).all())):
        raise torch.linalg.LinAlgError("its eigenvalues are not finite")  # type: ignore[attr-defined]
    return vectors_a, vectors_g, 1 / (torch.outer(values_g.clamp(min=0), values_a.clamp(min=0)) + damping)


def precondition(gradient: Tensor, vectors_a: Tensor, vectors_g: Tensor, divisors: Tensor) -> Tensor:
    """Return the gradient of a layer times the inverse of its curvature."""
    return vectors_g @ ((vectors_g.T @ gradient @ vectors_a) * divisors) @ vectors_a.T


def pack(matrices: Sequence[Tensor]) -> Tensor:
    """Return one half of each of these symmetric matrices, one after the other."""
    return torch.cat([each[_upper(len(each))] for each in matrices])


def unpack(packed: Tensor, into: Sequence[Tensor]) -> None:
    """Write both halves of symmetric matrices from what `pack` gives."""
    for each, half in zip(into, packed.split([triangle(len(each)) for each in into]), strict=True):
        rows, columns = _upper(len(each))
        each[rows, columns] = half
        each[columns, rows] = half


def _upper(side: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(side, side)
    return rows, columns
