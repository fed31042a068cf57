"""`Training`: model, optimizers, batches and the function of one step, so that a technique can change any of them.

    training = Training(name="mine", model=model, optimizers=(optimizer,), loader=loader, loss=loss)
    faster = MixedPrecision().apply(training)
    for loss in faster.steps(100):
        ...

A step is the plain loop: take a batch, forward, backward, update, clear gradients. Techniques do not replace the loop
but the parts it is made of, which is why they compose: contexts around the forward pass, changes of a batch, a number
of micro-batches, a gradient scaler, another loader, another model, other optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretrace.errors import ForetraceError
from foretrace.training.batches import Batch, Batches, Resident, move, parts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Context = Callable[[], AbstractContextManager[Any]]
Loss = Callable[["nn.Module", Batch], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training job. Frozen: a technique returns another one, made from a copy (`copied`)."""

    name: str
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    loader: Batches  # a DataLoader, `Resident` batches, or anything that can be iterated again and again
    loss: Loss  # forward pass and loss of one batch
    run: Callable[[Training, Batch], Tensor] | None = None  # one step, where the plain one does not do (a GAN)
    device: str = "cpu"
    around_forward: tuple[Context, ...] = ()  # entered around every forward pass, first one outermost
    on_batch: tuple[Callable[[Batch], Batch], ...] = ()  # applied to every batch once it is on the device
    micro_batches: int = 1  # parts of a batch whose gradients are added before one update
    scaler: Any = None  # torch.amp.GradScaler, where 16-bit gradients could underflow
    clip_norm: float = 0.0  # longest gradient (2-norm over an optimizer's parameters) of an update; 0 is any
    applied: tuple[str, ...] = ()  # techniques, as they are written

    def copied(self) -> Training:
        """Return the same job with a model and optimizers of its own; batches that lie in memory are shared."""
        model, optimizers, around = copy.deepcopy((self.model, self.optimizers, self.around_forward))
        return replace(self, model=model, optimizers=optimizers, around_forward=around)

    def compiled(self, mode: str) -> Training:
        """Return the same job with its model compiled (`torch.compile`) on first use; copies of it are
        compiled again.
        """
        inner = self.loss

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            if getattr(model, "_compiled_call_impl", None) is None:
                if type(model).forward.__module__.startswith("torch."):  # PyTorch compiles none of its own frames
                    import torch

                    def called(*given: Any, **named: Any) -> Any:
                        return model._call_impl(*given, **named)

                    model._compiled_call_impl = torch.compile(called, mode=mode)
                else:
                    model.compile(mode=mode)
            return inner(model, batch)

        return replace(self, loss=loss)

    def on(self, device: str) -> Training:
        """Return the same job on another device; its model is moved. Raises ForetraceError where there is no such
        device.
        """
        import torch

        try:
            self.model.to(torch.device(device))
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise ForetraceError(f"{self.name} cannot be moved to the device {device!r}: {first}.") from error
        return replace(self, device=device)

    def with_batches(self, count: int) -> Training:
        """Return the same job on `count` batches that were made once and lie ready: steps without data loading."""
        return replace(self, loader=Resident.taken_from(self.loader, count))

    def batches(self) -> Iterator[Batch]:
        """Yield batches without end, on the device: the loader, begun again whenever it is over."""
        while True:
            empty = True
            for batch in self.loader:
                empty = False
                moved = move(batch, self.device, non_blocking=bool(getattr(self.loader, "pin_memory", False)))
                for change in self.on_batch:
                    moved = change(moved)
                yield moved
            if empty:
                return

    def steps(self, count: int | None = None) -> Generator[Tensor]:
        """Yield train: one step per item, which is the detached loss. Without `count`, until the caller stops."""
        self.model.train()
        for i, batch in enumerate(self.batches()):
            if i == count:
                return
            yield self.step(batch).detach()

    def step(self, batch: Batch) -> Tensor:
        """Return one training step on a batch that is on the device."""
        return plain_step(self, batch) if self.run is None else self.run(self, batch)

    def forward(self, batch: Batch, loss: Loss | None = None) -> Tensor:
        """Return forward pass and loss (this job's, or the one given) inside `around_forward`."""
        with ExitStack() as stack:
            for context in self.around_forward:
                stack.enter_context(context())
            return (loss or self.loss)(self.model, batch)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, scaled where there is a scaler."""
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()

    def update(self, *optimizers: Optimizer) -> None:
        """Clip gradients of one backward pass if asked for, take a step of these optimizers, then clear gradients."""
        for optimizer in optimizers:
            if self.clip_norm:
                from torch.nn.utils import clip_grad_norm_

                if self.scaler is not None:
                    self.scaler.unscale_(optimizer)
                clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], self.clip_norm)
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None and optimizers:  # once all have used the scale of that pass
            self.scaler.update()

    @property
    def batch_size(self) -> int:
        """Samples per step; 0 if the loader does not say."""
        return int(getattr(self.loader, "batch_size", None) or 0)

    def __len__(self) -> int:
        """Return batches per epoch, 0 if unknown."""
        return len(self.loader) if isinstance(self.loader, Sized) else 0


def plain_step(training: Training, batch: Batch) -> Tensor:
    """Return forward, backward and update; several micro-batches add their gradients, each weighted by its share."""
    pieces = parts(batch, training.micro_batches) if training.micro_batches > 1 else [batch]
    total: Tensor | None = None
    for piece in pieces:
        loss = training.forward(piece)
        if len(pieces) > 1:
            loss = loss / len(pieces)
        training.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
    training.update(*training.optimizers)
    assert total is not None  # there is at least one piece
    return total
