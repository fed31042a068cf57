"""Layers that look their products up: product quantisation of the inputs of convolutions and linear layers.

    names = quantise(model, lambda: model(images), Quantiser(length=9, prototypes=16))

Inputs of a product are cut into sub-vectors of some length, and each is replaced by the nearest of a few prototypes.
Prototypes times weights are known in advance: at inference a table is read and summed, and nothing is multiplied but
within the encoder (Jégou et al., TPAMI 2011; AbouElhamayed et al., PQA, TRETS 2024). Sub-vectors of a convolution lie
within its patches, channel by channel: with a 3×3 filter and length 9 each is one channel. Where the length does not
divide the inputs, zeros are added to them, which leaves every sum as it is. Prototypes begin as k-means of each
sub-space and are then trained.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.cost.operators.arguments import BoundCall
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError

Distance = Literal["l1", "l2"]
_SAMPLES = 4096  # rows that k-means sees
_ROUNDS = 12  # of k-means
_AT_ONCE = 1 << 25  # distances held at once


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """How inputs of a product are quantised."""

    length: int  # numbers of a sub-vector
    prototypes: int  # of each sub-space
    distance: Distance = "l2"  # of the encoder: "l1" needs no multipliers
    assignment: Literal["straight", "soft"] = "straight"  # in training: nearest, identity to inputs; or by softmax
    bits: int = 0  # of inputs, prototypes and table at inference, 2 or more; 0: as they are

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("prototypes", 1), ("bits", 0)):
            if getattr(self, name) < least:
                raise ForetraceError(f"`{name}` must be {least} or more, got {getattr(self, name)}.")
        if self.bits == 1:
            raise ForetraceError("`bits` must be 0, or 2 or more (one is the sign), got 1.")
        if self.distance not in ("l1", "l2") or self.assignment not in ("straight", "soft"):
            raise ForetraceError(
                f"distance must be l1 or l2 and assignment straight or soft, got {self.distance} and {self.assignment}."
            )


def distances(rows: Tensor, prototypes: Tensor, distance: Distance) -> Tensor:
    """Return distances (sub-spaces, rows, K) of rows (rows, sub-spaces, length) to prototypes (sub-spaces, K, length).

    "l2" are squared, and less the squares of rows, which change no order.
    """
    each = rows.transpose(0, 1)
    if distance == "l1":
        return torch.cdist(each, prototypes, p=1.0)
    return torch.baddbmm(prototypes.square().sum(2).unsqueeze(1), each, prototypes.transpose(1, 2), alpha=-2)


def encode(rows: Tensor, prototypes: Tensor, distance: Distance) -> Tensor:
    """Return rows (rows, sub-spaces) int64 of the flattened prototypes, or of a flattened table, that are nearest."""
    spaces, many = prototypes.shape[:2]
    parts = rows.split(max(_AT_ONCE // (spaces * many), 1))
    codes = torch.cat([distances(part, prototypes, distance).argmin(2).t() for part in parts])
    return codes + torch.arange(0, spaces * many, many, device=codes.device)


def learn_prototypes(rows: Tensor, quantiser: Quantiser, seed: int = 0) -> Tensor:
    """Return prototypes (sub-spaces, K, length) by k-means of rows (rows, sub-spaces, length), begun with k-means++.

    With as many prototypes as distinct sub-vectors, these are the prototypes.

    Raises:
        ForetraceError: fewer rows than prototypes.

    """
    many = quantiser.prototypes
    if len(rows) < many:
        raise ForetraceError(
            f"{many} prototypes need as many samples or more, got {len(rows)}; give more samples or fewer prototypes."
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(rows), generator=generator)[: max(_SAMPLES, many)]
    each = rows.detach()[chosen].transpose(0, 1)  # (sub-spaces, rows, length)
    found = each[:, :1]
    apart = torch.cdist(each, found).squeeze(2).square()
    for _ in range(many - 1):
        weight = apart + (apart.sum(1, keepdim=True) == 0)  # all are prototypes already: any will do
        next_ = torch.multinomial(weight.clamp(max=1e30).cpu(), 1, generator=generator).to(each.device)
        new = each.gather(1, next_.unsqueeze(2).expand(-1, -1, each.shape[2]))
        found = torch.cat([found, new], 1)
        apart = torch.minimum(apart, (each - new).square().sum(2))
    spaces, _, length = found.shape
    for _ in range(_ROUNDS):
        flat = encode(each.transpose(0, 1), found, quantiser.distance).t().flatten()
        size = torch.bincount(flat, minlength=spaces * many).unsqueeze(1)
        total = each.new_zeros(spaces * many, length).index_add_(0, flat, each.reshape(-1, length))
        found = torch.where(size > 0, total / size.clamp(min=1), found.flatten(0, 1)).view(spaces, many, length)
    return found.contiguous()


def _rounded(x: Tensor, bits: int) -> Tensor:
    """Return numbers as whole multiples of one step, so many bits wide with their sign."""
    step = x.abs().amax().clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return torch.round(x / step).mul(step)


class ProductQuantised(nn.Module):
    """A convolution or linear layer whose inputs are replaced by prototypes; a table is read unless it trains.

    Weights, bias and prototypes are trained.
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, quantiser: Quantiser, rows: Tensor | None, seed: int = 0) -> None:
        """Take a layer's place; `rows` (rows, inputs) are what it met, None leaves prototypes at random."""
        super().__init__()
        if refusal := why_not(layer):
            raise ForetraceError(refusal)
        self.quantiser, self.layer = quantiser, layer
        self.inputs = prod(layer.weight.shape[1:])
        spaces = -(-self.inputs // quantiser.length)
        if rows is None:
            shape = (spaces, quantiser.prototypes, quantiser.length)
            found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(layer.weight)
        else:
            found = learn_prototypes(self._cut(rows), quantiser, seed)
        self.prototypes = nn.Parameter(found, requires_grad=layer.weight.requires_grad)
        self._table: tuple[tuple[int, ...], Tensor] | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Return inputs of the products, (rows, inputs): patches of a convolution."""
        layer = self.layer
        if isinstance(layer, nn.Conv2d):
            x = functional.unfold(_padded(layer, x), layer.kernel_size, layer.dilation, 0, layer.stride).transpose(1, 2)
        return x.reshape(-1, self.inputs)

    def table(self) -> Tensor:
        """Return products of all prototypes, (sub-spaces, K, outputs)."""
        spaces, _, length = self.prototypes.shape
        weight = self.layer.weight.flatten(1)
        weight = functional.pad(weight, (0, spaces * length - self.inputs)).view(-1, spaces, length)
        return torch.einsum("ckv,mcv->ckm", self.prototypes, weight)

    def codes(self, rows: Tensor) -> Tensor:
        """Return which of the flattened prototypes are nearest to inputs (rows, inputs): (rows, sub-spaces) int64."""
        return encode(self._cut(rows), self.prototypes.detach(), self.quantiser.distance)

    def reconstructed(self, rows: Tensor) -> Tensor:
        """Return inputs (rows, inputs) as their prototypes; gradients reach both."""
        cut, prototypes = self._cut(rows), self.prototypes
        if self.quantiser.assignment == "soft":
            near = torch.cdist(cut.transpose(0, 1), prototypes, p=1.0 if self.quantiser.distance == "l1" else 2.0)
            if self.quantiser.distance == "l2":
                near = near.square()
            # the spread of each sub-space is its temperature: shares do not depend on the scale of inputs
            near = near / near.detach().amin(2, keepdim=True).mean(1, keepdim=True).clamp(min=1e-6)
            quantised = (torch.softmax(-near, 2) @ prototypes).transpose(0, 1)
        else:
            nearest = prototypes.flatten(0, 1).index_select(0, self.codes(rows.detach()).flatten()).view(cut.shape)
            quantised = nearest + (cut - cut.detach())  # the identity to inputs: their gradients pass by
        return quantised.reshape(len(rows), -1)[:, : self.inputs]

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of the layer on inputs of its shape."""
        layer, rows = self.layer, self.rows(x)
        if self.training:
            out = functional.linear(self.reconstructed(rows), layer.weight.flatten(1), layer.bias)
        else:
            out = self.looked_up(rows)
        if isinstance(layer, nn.Linear):
            return out.view(*x.shape[:-1], -1)
        high, wide = (
            (n - dilation * (kernel - 1) - 1) // stride + 1
            for n, dilation, kernel, stride in zip(
                _padded(layer, x[:1]).shape[2:], layer.dilation, layer.kernel_size, layer.stride, strict=True
            )
        )
        return out.view(len(x), high, wide, -1).permute(0, 3, 1, 2)

    def looked_up(self, rows: Tensor) -> Tensor:
        """Return outputs (rows, outputs): a row of the table per sub-space, summed."""
        bits, cut, table = self.quantiser.bits, self._cut(rows), self._kept_table()
        prototypes: Tensor = self.prototypes
        if bits:
            cut, prototypes, table = (_rounded(each, bits) for each in (cut, prototypes, table))
        codes = encode(cut, prototypes, self.quantiser.distance)
        out = functional.embedding_bag(codes, table.flatten(0, 1), mode="sum")
        return out if self.layer.bias is None else out + self.layer.bias

    def _kept_table(self) -> Tensor:
        if torch.is_grad_enabled():
            return self.table()
        version = tuple(n for each in (self.prototypes, self.layer.weight) for n in (each._version, each.data_ptr()))
        if self._table is None or self._table[0] != version:
            self._table = version, self.table()
        return self._table[1]

    def _cut(self, rows: Tensor) -> Tensor:
        """Return rows as sub-vectors, (rows, sub-spaces, length), zeros added where they do not divide."""
        length = self.quantiser.length
        rows = functional.pad(rows, (0, -self.inputs % length)) if self.inputs % length else rows
        return rows.view(len(rows), -1, length)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.quantiser).items())


def _padded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return images with their borders."""
    mode, border = layer.padding_mode, layer._reversed_padding_repeated_twice
    return functional.pad(x, border, mode="constant" if mode == "zeros" else mode) if any(border) else x


def why_not(layer: nn.Module) -> str:
    """Return why a layer's products cannot be looked up, in a sentence; "" where they can."""
    if type(layer) not in (nn.Conv2d, nn.Linear):
        return f"product quantisation replaces nn.Conv2d and nn.Linear, got {type(layer).__name__}."
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return f"a convolution of {layer.groups} groups cannot be quantised as one product; leave it as it is."
    return ""


def quantise(
    model: nn.Module, run: Callable[[], object], quantiser: Quantiser, *, first: bool = False, seed: int = 0
) -> list[str]:
    """Replace the convolutions and linear layers of a model, in place, one after the other, by k-means alone.

    Args:
        model: left in the mode (training or not) that it has.
        run: runs the model on samples; each layer's prototypes are learned from what it meets, earlier ones replaced.
        quantiser: of all layers.
        first: replace the first layer that runs, too: it has few inputs and reads the data itself.
        seed: of k-means.

    Returns:
        Names of the layers that were replaced, in the order in which they run.

    Raises:
        ForetraceError: no layer can be replaced, or fewer samples than prototypes.

    """
    modes = {name: module.training for name, module in model.named_modules()}
    names = {module: name for name, module in model.named_modules() if name and not why_not(module)}
    order: dict[nn.Module, None] = {}
    model.eval()
    try:
        with torch.no_grad():
            _run(names, lambda module, _: order.setdefault(module), run)
            replaced = list(order)[0 if first else 1 :]
            if not replaced:
                raise ForetraceError(
                    "no layer can be quantised: none but the first that runs is a Linear or a Conv2d of one group."
                )
            for number, layer in enumerate(replaced):
                assert isinstance(layer, nn.Conv2d | nn.Linear)
                new = ProductQuantised(layer, quantiser, _met(layer, quantiser, run), seed + number)
                for name, module in list(model.named_modules(remove_duplicate=False)):
                    if module is layer:
                        above, _, last = name.rpartition(".")
                        setattr(model.get_submodule(above), last, new)
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, modes.get(name.rpartition(".")[0], model.training))
    return [names[layer] for layer in replaced]


def _met(layer: nn.Conv2d | nn.Linear, quantiser: Quantiser, run: Callable[[], object]) -> Tensor:
    """Return inputs (rows, inputs) of a layer's products, some of every call."""
    shaped, found = ProductQuantised(layer, quantiser, None), list[Tensor]()

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        rows = shaped.rows(args[0])
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(found)))
        found.append(rows[chosen[: max(_SAMPLES, quantiser.prototypes)]])

    _run([layer], note, run)
    return torch.cat(found)


def _run(layers: Iterable[nn.Module], hook: Callable[..., None], run: Callable[[], object]) -> None:
    """Run a model with a hook ahead of some layers."""
    hooks = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        run()
    finally:
        for each in hooks:
            each.remove()


def prepared_layer(operator: Operator) -> BoundCall:
    """Return a layer as a recorded call has it, "plain" or looked up, to be timed alone."""
    x, weight, bias = (operator.tensor(at) for at in range(3))
    layer: nn.Conv2d | nn.Linear
    if len(weight) == 4:
        stride, padding, dilation = (ast.literal_eval(operator.concrete[at]) for at in (3, 4, 5))
        layer = nn.Conv2d(x[1], weight[0], weight[2:], stride, padding, dilation, bias=bool(bias))
    else:
        layer = nn.Linear(weight[1], weight[0], bias=bool(bias))
    module: nn.Module = layer
    if operator.concrete[-1] != "plain":
        length, prototypes, distance = operator.concrete[-1].split()
        quantiser = Quantiser(length=int(length), prototypes=int(prototypes), distance=distance)  # type: ignore[arg-type]
        module = ProductQuantised(layer, quantiser, None)
    return BoundCall(function=module.eval(), args=(torch.randn(x),), kwargs={})
