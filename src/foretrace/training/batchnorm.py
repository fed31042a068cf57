"""Batch normalisation restructured: fewer passes over the data, and the ReLU behind it in the same module.

Mean and variance come from two sums, E(x²) − E(x)² (the mean/variance fusion of Jung et al., section 3.1), the
normalisation is one affine pass, the ReLU is done in place, and the backward pass takes the ReLU's mask from its
result, so that nothing between the two is kept. In float32 the variance loses digits where a channel's mean is far
larger than its deviation: relative error about 1e-7 · (1 + mean² / variance).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from foretrace.cost.operators.operator import Operator
from foretrace.training.batches import Batch

_ALTERNATING_BYTES = 24 * 2**20  # activations that calls timed alone take turns on


class _Normalise(torch.autograd.Function):
    """y = relu?((x − mean) / sqrt(var + eps) · weight + bias); also gives mean and variance, for the running ones."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, rectify: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.mean((0, 2, 3))
        var = (x * x).mean((0, 2, 3)).addcmul_(mean, mean, value=-1.0).clamp_min_(0.0)
        y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        if rectify:
            y.relu_()
        ctx.eps, ctx.rectify = eps, rectify
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt_(), *([y] if rectify else []))
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, inverse, *y = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None
        if ctx.rectify:
            grad = torch.ops.aten.threshold_backward.default(grad, y[0], 0)
        wanted = list(ctx.needs_input_grad[:3])
        made = torch.ops.aten.native_batch_norm_backward.default(
            grad, x, weight, None, None, mean, inverse, True, ctx.eps, wanted
        )
        dx, dweight, dbias = (each if want else None for each, want in zip(made, wanted, strict=True))
        return dx, dweight, dbias, None, None


class RestructuredBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d that may do the ReLU behind it; it shares parameters and statistics with the one it replaces."""

    rectify: bool

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, *, rectify: bool) -> RestructuredBatchNorm2d:
        """Make one in the place of `norm`, whose parameters, statistics and hooks it takes over."""
        made = cls.__new__(cls)
        made.__dict__.update(norm.__dict__)
        made.rectify = rectify
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as nn.BatchNorm2d does, then ReLU where it does that: (N, C, H, W) -> (N, C, H, W)."""
        if not self.training or input.dtype != torch.float32 or torch.is_autocast_enabled(input.device.type):
            y = super().forward(input)
            return y.relu() if self.rectify else y
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        assert self.momentum is not None
        made: tuple[Tensor, Tensor, Tensor] = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.rectify
        )
        y, mean, var = made
        count = input.numel() // input.shape[1]
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / max(count - 1, 1)), self.momentum)
        return _Rectified.mark(y) if self.rectify else y


class _Rectified(nn.Module):
    """In the place of a ReLU whose input a RestructuredBatchNorm2d may have rectified already."""

    def __init__(self, relu: nn.ReLU) -> None:
        super().__init__()
        self.relu = relu

    @staticmethod
    def mark(y: Tensor) -> Tensor:
        y.foretrace_rectified = True  # type: ignore[attr-defined]
        return y

    def forward(self, input: Tensor) -> Tensor:
        if getattr(input, "foretrace_rectified", False):
            return input
        made: Tensor = self.relu(input)
        return made


def restructure(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch, min_bytes: int = 0
) -> tuple[int, int]:
    """Replace in place every BatchNorm2d of `model` whose inputs have `min_bytes`, with the nn.ReLU that alone uses it.

    `loss(model, batch)` is run once on a copy in training mode to see who uses what. Returns the number of batch norms
    replaced and how many of them took their ReLU in.
    """
    norms = {name for name, each in model.named_modules() if type(each) is nn.BatchNorm2d and _plain(each)}
    pairs, smallest = _pairs(copy.deepcopy(model).train(), norms, loss, batch) if norms else ({}, {})
    norms = {name for name in norms if smallest.get(name, -1) >= min_bytes}
    pairs = {norm: relu for norm, relu in pairs.items() if norm in norms}
    modules = dict(model.named_modules(remove_duplicate=False))
    new: dict[nn.Module, nn.Module] = {}
    for name in norms:
        norm = modules[name]
        assert isinstance(norm, nn.BatchNorm2d)
        new[norm] = RestructuredBatchNorm2d.of(norm, rectify=name in pairs)
    for name in set(pairs.values()):
        relu = modules[name]
        assert isinstance(relu, nn.ReLU)
        new[relu] = _Rectified(relu)
    for name, module in modules.items():
        if module in new and name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, new[module])
    return len(norms), len(pairs)


def _plain(norm: nn.BatchNorm2d) -> bool:
    return norm.affine and norm.track_running_stats and norm.momentum is not None


def _pairs(
    model: nn.Module, norms: set[str], loss: Callable[[nn.Module, Batch], Tensor], batch: Batch
) -> tuple[dict[str, str], dict[str, int]]:
    """Return batch norms all of whose results go into one nn.ReLU and nowhere else, with that ReLU; by name.

    Also the bytes of the smallest input of every module watched that ran.
    """
    made_by: dict[Any, str] = {}  # autograd node -> module
    smallest: dict[str, int] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                made_by[output.grad_fn] = name
                nbytes = output.numel() * output.element_size()
                smallest[name] = min(smallest.get(name, nbytes), nbytes)

        return note

    relus = {name for name, each in model.named_modules() if type(each) is nn.ReLU}
    for name, module in model.named_modules():
        if name in norms | relus:
            module.register_forward_hook(watch(name))
    root = loss(model, batch).grad_fn
    users: dict[Any, list[Any]] = {}
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions if node is not None else ():
            users.setdefault(following, []).append(node)
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    found: dict[str, str] = {}
    spoiled: set[str] = set()
    for node, name in made_by.items():
        if name in norms:
            into = [made_by.get(each, "") for each in users.get(node, [])]
            if len(into) == 1 and into[0] in relus and found.get(name, into[0]) == into[0]:
                found[name] = into[0]
            else:
                spoiled.add(name)
    return {norm: relu for norm, relu in found.items() if norm not in spoiled}, smallest


# --- timed alone ---------------------------------------------------------------------------------------------


def pass_operator(size: list[int], *, restructured: bool) -> Operator:
    """Return forward and backward pass of one batch norm with its ReLU over float32 activations (N, C, H, W)."""
    concrete = ["", "restructured" if restructured else "plain"]
    return Operator.of(f"{__name__}:prepared_pass", [size, []], ["float", ""], concrete)


def prepared_pass(operator: Operator) -> Callable[[], object]:
    """Return what a `pass_operator` stands for; calls take turns on activations that exceed a core's caches."""
    size = operator.dims[0]
    norm: nn.Module = nn.BatchNorm2d(size[1])
    if operator.concrete[1] == "restructured":
        norm = RestructuredBatchNorm2d.of(nn.BatchNorm2d(size[1]), rectify=True)
        module = nn.Sequential(norm, _Rectified(nn.ReLU(inplace=True)))
    else:
        module = nn.Sequential(norm, nn.ReLU(inplace=True))
    sets = max(1, min(12, _ALTERNATING_BYTES // (4 * prod(size))))
    inputs = [torch.randn(size, requires_grad=True) for _ in range(sets)]
    grads = [torch.randn(size) for _ in range(sets)]
    turn = 0

    def call() -> object:
        nonlocal turn
        turn = (turn + 1) % sets
        with torch.enable_grad():
            return torch.autograd.grad(module(inputs[turn]), [inputs[turn], *module.parameters()], grads[turn])

    return call
