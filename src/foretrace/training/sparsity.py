"""Zeros of a training's convolutions: masks of their inputs and output gradients, taken by hooks of real steps.

Where the input of a convolution is what ReLUs gave (through pooling, concatenation, dropout, reshaping), the gradient
of its zeros is masked before anything else reads it: it need not be computed (Sarma et al., arXiv 2109.07710, section
3). `exact` tries that on the user's own model, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from foretrace.arrays import Mask
from foretrace.cost.accelerators.sparse import MaskedConv
from foretrace.errors import ForetraceError
from foretrace.training.batches import Batch, mapped
from foretrace.training.training import Training

IMAGES = 8  # of a batch: masks of more say the same

# Backward nodes through which a zero stays one that ReLUs made, whose gradient they mask.
_THROUGH = (
    "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Cat", "View", "UnsafeView", "ReshapeAlias", "Clone",
    "Transpose", "Permute", "Squeeze", "Unsqueeze", "NativeDropout", "ChannelShuffle",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MaskSample:
    """Masks of all convolutions in one training step."""

    step: int  # updates before it
    loss: float
    convs: tuple[MaskedConv, ...]


def samples(training: Training, at: tuple[int, ...], *, images: int = IMAGES) -> Iterator[MaskSample]:
    """Train, and take masks of `images` samples before the steps `at`. Raises ForetraceError without convolutions."""
    running = training.steps()
    for step in range(max(at) + 1):
        if step in at:
            yield taken(training, step=step, images=images)
        if step < max(at):
            next(running)


def taken(training: Training, *, step: int = 0, images: int = IMAGES) -> MaskSample:
    """Return masks of one step on a batch of the training, which stays as it is."""
    job = training.copied()
    calls: list[_Call] = []

    def hook(name: str) -> Callable[..., None]:
        def after(module: _ConvNd, given: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            call = _Call(name, module, _mask(given[0], images), given[0].requires_grad, _by_relus(given[0].grad_fn))
            calls.append(call)
            output.register_hook(lambda gradient: setattr(call, "gradients", _mask(gradient, images)))

        return after

    with _hooked(job, lambda name, module: module.register_forward_hook(hook(name))):
        loss = float(job.step(_batch(job)).detach())
    # Parts whose gradient nothing asked for took no part in the step.
    convs = tuple(each.masked(index) for index, each in enumerate(calls) if each.gradients is not None)
    return MaskSample(step=step, loss=loss, convs=convs)


def exact(training: Training) -> bool:
    """Return whether all parameter gradients stay bit-identical in float64 where masked input gradients are not
    computed.

    Raises ForetraceError where the model cannot be run in float64.
    """
    job = training.copied()
    job.model.double()
    batch = mapped(_batch(job), lambda each: each.double() if each.is_floating_point() else each)
    gradients: list[list[tuple[str, Tensor]]] = []
    for before in (lambda *_: None, _skipping):
        run = job.copied()
        found: list[tuple[str, Tensor]] = []
        for name, parameter in run.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_keeper(name, found))
        hooked = _hooked(run, partial(_before, before))
        with torch.random.fork_rng(devices=[]), hooked:
            torch.manual_seed(0)
            try:
                run.step(batch)
            except (RuntimeError, TypeError) as error:
                said = str(error).splitlines()[0].rstrip(".")
                raise ForetraceError(
                    f"{training.name} does not run in float64, so skipping is unchecked: {said}."
                ) from error
        gradients.append(found)
    plain, skipped = gradients
    return len(plain) == len(skipped) and all(
        one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in zip(plain, skipped, strict=True)
    )


def _before(hook: Callable[..., Any], _: str, module: _ConvNd) -> Any:
    return module.register_forward_pre_hook(hook)


class _Skip(torch.autograd.Function):
    """Passes its input on, and no gradient where that is 0."""

    @staticmethod
    def forward(context: Any, given: Tensor) -> Tensor:
        context.save_for_backward(given)
        return given.view_as(given)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        (given,) = context.saved_tensors
        return torch.where(given != 0, gradients[0], torch.zeros_like(gradients[0]))


_skip: Callable[[Tensor], Tensor] = _Skip.apply


def _skipping(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    masked = given[0].requires_grad and _by_relus(given[0].grad_fn)
    return (_skip(given[0]), *given[1:]) if masked else given


def _keeper(name: str, found: list[tuple[str, Tensor]]) -> Callable[[Tensor], None]:
    return lambda parameter: found.append((name, parameter.grad.clone() if parameter.grad is not None else parameter))


@dataclass(slots=True)
class _Call:
    """One call of a convolution, while the step runs."""

    name: str
    module: _ConvNd
    inputs: Mask
    learns: bool
    maskable: bool
    gradients: Mask | None = None

    def masked(self, index: int) -> MaskedConv:
        """Return it with its gradient known."""
        module, spatial = self.module, self.inputs.ndim - 2
        padding = module.padding
        if isinstance(padding, str):  # "same" puts the smaller half before
            reach = [d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            padding = tuple(reach) if padding == "same" else (0,) * spatial
        assert self.gradients is not None
        return MaskedConv(
            name=self.name or f"convolution {index}", weight=tuple(module.weight.shape), stride=tuple(module.stride),
            padding=tuple(padding), dilation=tuple(module.dilation), groups=module.groups, inputs=self.inputs,
            gradients=self.gradients, input_gradient=self.learns, maskable=self.maskable,
        )  # fmt: skip


def _by_relus(node: Any) -> bool:
    """Return whether all values come from ReLUs through what keeps their zeros."""
    name = type(node).__name__.partition("Backward")[0]
    if name == "Hardtanh":  # ReLU6
        return bool(node._saved_min_val == 0)
    if name == "Threshold":
        return bool(node._saved_threshold == 0)
    if name == "Relu":
        return True
    if not name.startswith(_THROUGH):
        return False
    return bool(node.next_functions) and all(_by_relus(each) for each, _ in node.next_functions)


def _mask(values: Tensor, images: int) -> Mask:
    """Return where the first samples are not 0; a sample alone gets the dimension of samples."""
    found: Mask = (values.detach()[:images] != 0).cpu().numpy()
    return found


@contextmanager
def _hooked(training: Training, hook: Callable[[str, Any], Any]) -> Iterator[None]:
    """Put hooks on all convolutions of the model, and remove them in the end. Raises ForetraceError where it
    has none.
    """
    handles = [
        hook(name, module)
        for name, module in training.model.named_modules()
        if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)
    ]
    try:
        if not handles:
            raise ForetraceError(f"{training.name} has no convolution (torch.nn.Conv2d or its kin): nothing to skip.")
        yield
    finally:
        for each in handles:
            each.remove()


def _batch(training: Training) -> Batch:
    batch = next(training.batches(), None)
    if batch is None:
        raise ForetraceError(f"the loader of {training.name} gives no batch; give it at least one.")
    return batch
