"""Compressed activations between workers that share a model: real modules for tensor- and pipeline-parallel boundaries.

Source: Bian et al., Does Compressing Activations Help Model Parallel Training? (arXiv 2301.02654): a linear
auto-encoder trained with the model, top-k, random-k with a common seed, quantisation to 2, 4 or 8 bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foretrace.errors import NotApplicableError
from foretrace.training.compression.codecs import Levels, dequantise, quantise, random_indices, top_k
from foretrace.training.compression.settings import Boundary, kept
from foretrace.training.data_parallel import same_start
from foretrace.training.training import Training


class ActivationCodec(nn.Module):
    """Encoder and decoder of activations [..., hidden]."""

    def __init__(self, boundary: Boundary, hidden: int) -> None:
        super().__init__()
        self.boundary, self.hidden = boundary, hidden
        self.passes = 0  # of the random choice; counts forward passes, the same on all workers
        if boundary.method == "autoencoder":
            code = kept(hidden, boundary.share)
            basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(0)))[0]
            self.encoder = nn.Parameter(basis[:, :code].clone())  # starts as a projection: W_d W_e keeps its subspace
            self.decoder = nn.Parameter(basis[:, :code].T.clone())

    def extra_repr(self) -> str:
        """Return what torch prints of modules."""
        return f"{self.boundary.method}, hidden={self.hidden}"


class AllReduced(ActivationCodec):
    """Sum over tensor-parallel workers of compressed partial results; gradients go to every worker's own part."""

    def __init__(self, boundary: Boundary, hidden: int, group: Any = None) -> None:
        super().__init__(boundary, hidden)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden], this worker's part -> [..., hidden], the sum of all."""
        self.passes += 1
        match self.boundary.method:
            case "autoencoder":
                summed: Tensor = _Summed.apply(x @ self.encoder, self.group)  # type: ignore[no-untyped-call]
                return summed @ self.decoder
            case "none":
                plain: Tensor = _Summed.apply(x, self.group)  # type: ignore[no-untyped-call]
                return plain
        lossy: Tensor = _Lossy.apply(x, self.boundary, self.passes, self.group)  # type: ignore[no-untyped-call]
        return lossy


class _Summed(torch.autograd.Function):
    """All-reduce forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Copied(torch.autograd.Function):
    """Identity forward, all-reduce backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Lossy(torch.autograd.Function):
    """Sum of everyone's chosen or rounded elements; gradients reach what was sent (rounding: straight through)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary, step: int, group: Any) -> Tensor:
        parts, everyones = _encoded(x.detach(), boundary, step), list[Sequence[Tensor]]()
        ctx.shape, ctx.chosen = x.shape, _chosen(parts, x.numel(), boundary, step)
        if boundary.method == "randomk":  # all chose the same elements
            dist.all_reduce(parts[0], group=group)
            everyones.append(parts)
        else:
            everyones += zip(*(_gather(each, dist.get_world_size(group), group) for each in parts), strict=True)
        out = x.new_zeros(x.numel())
        for each in everyones:
            _add(out, each, boundary, step)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.chosen is None:
            return grads[0], None, None, None
        flat = grads[0].reshape(-1)
        grad = torch.zeros_like(flat)
        grad[ctx.chosen] = flat[ctx.chosen]
        return grad.view(ctx.shape), None, None, None


def _gather(x: Tensor, workers: int, group: Any) -> list[Tensor]:
    everyones = [torch.empty_like(x) for _ in range(workers)]
    dist.all_gather(everyones, x, group=group)
    return everyones


class Sender(ActivationCodec):
    """End of a pipeline stage: sends the compressed activation on, and takes its gradient back.

    The result is a zero to call `backward` on: its gradient is what the next stage sends back.
    """

    def __init__(self, boundary: Boundary, hidden: int, to: int) -> None:
        super().__init__(boundary, hidden)
        self.stage = to

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden] -> []."""
        self.passes += 1
        code = x @ self.encoder if self.boundary.method == "autoencoder" else x
        end: Tensor = _Sent.apply(code, self.boundary, self.passes, self.stage)  # type: ignore[no-untyped-call]
        return end


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, code: Tensor, boundary: Boundary, step: int, to: int) -> Tensor:
        parts = _encoded(code.detach(), boundary, step)
        ctx.shape, ctx.stage, ctx.boundary = code.shape, to, boundary
        ctx.indices = _chosen(parts, code.numel(), boundary, step)
        for part in parts:
            dist.send(part, to)
        return code.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = torch.zeros(ctx.shape)
        if ctx.indices is not None:
            values = torch.empty(ctx.indices.numel())
            dist.recv(values, ctx.stage)
            grad.view(-1)[ctx.indices] = values
        elif ctx.boundary.method == "quantise":
            grad = _received(ctx.shape, ctx.boundary, 0, ctx.stage)[0]
        else:
            dist.recv(grad, ctx.stage)
        return grad, None, None, None


class Receiver(ActivationCodec):
    """Start of the next pipeline stage."""

    def __init__(self, boundary: Boundary, hidden: int, sender: int) -> None:
        super().__init__(boundary, hidden)
        self.sender = sender
        self.handle = nn.Parameter(torch.zeros(()))  # so that the activation has a gradient to send back

    def forward(self, shape: torch.Size) -> Tensor:
        """Return the activation of this shape that the stage before sends."""
        self.passes += 1
        if self.boundary.method == "autoencoder":
            shape = torch.Size((*shape[:-1], self.decoder.shape[0]))
        code: Tensor = _Received.apply(self.handle, shape, self.boundary, self.passes, self.sender)  # type: ignore[no-untyped-call]
        return code @ self.decoder if self.boundary.method == "autoencoder" else code


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, shape: torch.Size, boundary: Boundary, step: int, sender: int) -> Tensor:
        out, ctx.indices = _received(shape, boundary, step, sender)
        ctx.sender, ctx.boundary = sender, boundary
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        if ctx.indices is not None:
            dist.send(grad.view(-1)[ctx.indices], ctx.sender)
        else:
            for part in _encoded(grad, ctx.boundary, 0):
                dist.send(part, ctx.sender)
        return torch.zeros(()), None, None, None, None


def _encoded(x: Tensor, boundary: Boundary, step: int) -> tuple[Tensor, ...]:
    """Return what is sent of an activation or code."""
    flat = x.reshape(-1).contiguous()
    match boundary.method:
        case "quantise":
            levels = quantise(flat, boundary.bits)
            return torch.stack([levels.low, levels.step]), levels.packed
        case "topk":
            return top_k(flat, kept(flat.numel(), boundary.share))
        case "randomk":
            return (flat[random_indices(flat.numel(), kept(flat.numel(), boundary.share), step=step, bucket=0)],)
    return (x.contiguous(),)


def _chosen(parts: Sequence[Tensor], elements: int, boundary: Boundary, step: int) -> Tensor | None:
    """Return which elements were sent in these parts; None where all were."""
    match boundary.method:
        case "topk":
            return parts[1].long()
        case "randomk":
            return random_indices(elements, len(parts[0]), step=step, bucket=0, device=parts[0].device)
    return None


def _add(out: Tensor, parts: Sequence[Tensor], boundary: Boundary, step: int) -> None:
    """Add what `_encoded` was made of to [n]."""
    if boundary.method == "quantise":
        head, packed = parts
        out += dequantise(Levels(packed=packed, low=head[0], step=head[1], bits=boundary.bits, shape=out.shape))
        return
    chosen = _chosen(parts, out.numel(), boundary, step)
    if chosen is None:
        out += parts[0].view(-1)
    else:
        out.index_add_(0, chosen, parts[0])


def _received(shape: torch.Size, boundary: Boundary, step: int, sender: int) -> tuple[Tensor, Tensor | None]:
    """Return what `_encoded` was made of, and which elements were sent."""
    out, count = torch.zeros(shape.numel()), kept(shape.numel(), boundary.share)
    parts: list[Tensor]
    match boundary.method:
        case "quantise":
            parts = [torch.empty(2), torch.empty(ceil(out.numel() * boundary.bits / 8), dtype=torch.uint8)]
        case "topk":
            parts = [torch.empty(count), torch.empty(count, dtype=torch.int32)]
        case "randomk":
            parts = [torch.empty(count)]
        case _:
            parts = [torch.empty(shape)]
    for part in parts:
        dist.recv(part, sender)
    _add(out, parts, boundary, step)
    return out.view(shape), _chosen(parts, out.numel(), boundary, step)


class ColumnParallelLinear(nn.Linear):
    """Output features of one worker of a linear layer, whose input all workers hold."""

    def __init__(self, whole: nn.Linear, rank: int, workers: int) -> None:
        weight = whole.weight.detach().chunk(workers)[rank].clone()
        super().__init__(weight.shape[1], weight.shape[0], bias=whole.bias is not None)
        self.weight = nn.Parameter(weight)
        if whole.bias is not None:
            self.bias = nn.Parameter(whole.bias.detach().chunk(workers)[rank].clone())

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., in] -> [..., out / workers]."""
        return super().forward(Copied.apply(input, None))  # type: ignore[no-untyped-call]


class RowParallelLinear(nn.Linear):
    """Input features of one worker of a linear layer; results are added up over the workers, then comes the bias."""

    def __init__(self, whole: nn.Linear, rank: int, workers: int, boundary: Boundary) -> None:
        weight = whole.weight.detach().chunk(workers, dim=1)[rank].clone()
        super().__init__(weight.shape[1], weight.shape[0], bias=whole.bias is not None)
        self.weight = nn.Parameter(weight)
        if whole.bias is not None:
            self.bias = nn.Parameter(whole.bias.detach().clone())
        self.sum = AllReduced(boundary, weight.shape[0])

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., in / workers] -> [..., out]."""
        out: Tensor = self.sum(input @ self.weight.T)
        return out if self.bias is None else out + self.bias


def coding(boundary: Boundary, rows: int, hidden: int, answers: int, *, encode: bool) -> Callable[[], object]:
    """Return encoding of an activation [rows, hidden], or decoding and adding up of so many, to be timed alone."""
    torch.manual_seed(0)
    x = torch.randn(rows, hidden)
    codec = ActivationCodec(boundary, hidden)
    if boundary.method == "autoencoder":
        code = x @ codec.encoder
        return (lambda: x @ codec.encoder) if encode else (lambda: code @ codec.decoder)
    if encode:
        return lambda: _encoded(x, boundary, 1)
    parts = _encoded(x, boundary, 1)

    def decode() -> Tensor:
        flat = torch.zeros(x.numel())
        for _ in range(answers):
            _add(flat, parts, boundary, 1)
        return flat

    return decode


PLAIN = Boundary(method="none")


def divided(training: Training, boundary: Boundary, workers: int, *, all_layers: bool, name: str) -> Training:
    """Return the training with its MLPs divided; sums of the last half of the layers are compressed, or of all.

    Raises NotApplicableError, in the name of a technique, where the model has no such layers or they cannot be divided.
    """
    layers = [each for each in training.model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    if not layers:
        raise NotApplicableError(
            f"{name}: the model has no nn.TransformerEncoderLayer whose MLP could be divided between workers."
        )
    if any(each.linear1.out_features % workers for each in layers):
        raise NotApplicableError(f"{name}: an MLP cannot be divided evenly between {workers} workers.")
    same_start(training.model)  # what is not divided has to be the same everywhere
    rank = dist.get_rank()
    now = dict[int, list[nn.Parameter]]()  # in the place of a parameter
    for i, layer in enumerate(layers):
        compress, first, second = all_layers or i >= len(layers) // 2, layer.linear1, layer.linear2
        layer.linear2 = RowParallelLinear(second, rank, workers, boundary if compress else PLAIN)
        layer.linear1 = ColumnParallelLinear(first, rank, workers)
        layer.activation_relu_or_gelu = 0  # no fused path in evaluation, which would take a part for the whole
        for old, new in ((first, layer.linear1), (second, layer.linear2)):
            now[id(old.weight)] = [each for name, each in new.named_parameters() if name != "bias"]
            if old.bias is not None:
                now[id(old.bias)] = [new.bias]
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new for each in group["params"] for new in now.get(id(each), [each])]
    return training
