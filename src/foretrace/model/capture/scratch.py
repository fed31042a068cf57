"""Memory of recurrent layers that only their libraries know: what a forward pass leaves for the backward pass.

PyTorch's sizes-only versions of these operators return empty work spaces. oneDNN's depends on how it arranges states,
so it is asked by calling the operator on zeros of the same sizes (this machine's library, as is meant by `like="cpu"`).
cuDNN is not here to be asked: what it has to keep of every layer is taken, which is an estimate from below: the gates,
the cell and the result of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from foretrace.model.capture.known import values_of

_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # of cuDNN's kinds: ReLU, tanh, LSTM, GRU


_CTC = frozenset([torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor])


def has_sizes(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call of an operator whose result depends on the data in general does not do so here."""
    if func in _CTC:  # see `instead`
        return True
    places = args[1] if func is torch.ops.aten.index.Tensor else [None]
    return func is torch.ops.aten.index.Tensor and not any(
        each is not None and each.dtype in (torch.bool, torch.uint8) for each in places
    )


def instead(func: Any, args: Sequence[Any]) -> Any:
    """Return what a call returns whose sizes PyTorch does not work out without data; None for others.

    CTC loss keeps the logarithms of (samples, frames, 2 letters + 1), letters of the longest text.
    """
    if func is torch.ops.aten._cudnn_rnn_backward.default:
        x, weights, hx, cx = args[0], args[1], args[4], args[5]
        state = torch.empty_like(cx) if cx is not None else x.new_empty(0)
        return torch.empty_like(x), torch.empty_like(hx), state, [torch.empty_like(each) for each in weights]
    if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
        # PyTorch has it for float32 and float16, too, but not its sizes.
        return func(*(each.to(torch.bfloat16) for each in args[:2]), *args[2:]).to(args[0].dtype)
    if func not in _CTC:
        return None
    scores, targets, lengths = args[0], args[1], args[3]
    if isinstance(lengths, torch.Tensor):
        value = values_of(lengths)
        lengths = [] if value is None else value
    letters = max(lengths, default=targets.shape[-1])
    frames, samples = scores.shape[0], scores.shape[1]
    return scores.new_empty(samples), scores.new_empty(samples, frames, 2 * letters + 1)


def completed(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Return what the call returned, its work space with the size that it has in truth."""
    aten = torch.ops.aten
    if func is aten.mkldnn_rnn_layer.default:
        x, hidden = args[0], args[10]
        kinds = (bool(args[7]), int(args[9]), int(hidden), bool(args[12]), bool(args[14]), bool(args[15]))
        nbytes = _onednn(tuple(x.shape), tuple(args[1].shape), tuple(args[2].shape), tuple(args[5].shape), kinds)
        return (*out[:3], x.new_empty(nbytes, dtype=torch.uint8))
    if func is aten._cudnn_rnn.default and args[12]:
        x, kind, hidden, layers, both = args[0], args[6], args[7], args[9], 2 if args[13] else 1
        rows = x.numel() // x.shape[-1]
        each = _GATES[kind] + (2 if kind == 2 else 1)
        reserve = rows * hidden * layers * both * each * x.element_size()
        weights = sum(each.numel() for each in args[1])
        return (*out[:3], x.new_empty(reserve, dtype=torch.uint8), x.new_empty(weights))
    return out


@lru_cache(maxsize=256)
def _onednn(
    x: tuple[int, ...], w: tuple[int, ...], r: tuple[int, ...], h: tuple[int, ...], kinds: tuple[Any, ...]
) -> int:
    from torch.utils._python_dispatch import _disable_current_modes

    reverse, kind, hidden, biased, first, train = kinds
    with _disable_current_modes(), torch.enable_grad():
        bias = torch.zeros(w[0])
        found = torch.ops.aten.mkldnn_rnn_layer(
            torch.zeros(x), torch.zeros(w), torch.zeros(r), bias, bias, torch.zeros(h), torch.zeros(h), reverse, [],
            kind, hidden, 1, biased, False, first, train,
        )  # fmt: skip
    return int(found[3].numel())


def workspace(func: Any, args: Sequence[Any]) -> int:
    """Return bytes that a call has beside its inputs and results while it runs on a processor.

    oneDNN computes gradients of weights in layouts of its own, channels in eights: of a convolution from copies of
    input and gradient, and the result is copied to the ordinary layout after those are free (of a transposed one
    twice); of a recurrent layer from weights in its layout and with the gradients of all gates.
    """
    aten = torch.ops.aten
    if func is aten.convolution_backward.default and args[10][1]:
        weight = args[2]
        return max(_nbytes(weight) * (2 if args[7] else 1), _in_eights(args[0]) + _in_eights(args[1]))
    if func is aten.mkldnn_rnn_layer_backward.default:
        x, w, r = args[0], args[1], args[2]
        rows = int(x.numel() // x.shape[-1])
        return 2 * (_nbytes(w) + _nbytes(r)) + rows * int(w.shape[0]) * int(w.element_size())
    if func in (aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default):
        # rows are sorted: their numbers, places and bags, and the weight of each; bags may have to be found again
        dense = func is aten._embedding_bag_dense_backward.default
        weighted, bags = (args[8], args[2]) if dense else (args[10], args[3])
        arrays = 3 if bags.numel() else 4
        return arrays * _nbytes(args[1]) + (0 if weighted is None else _nbytes(weighted))
    return 0


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _in_eights(tensor: Any) -> int:
    channels = max(int(tensor.shape[1]), 1)
    return _nbytes(tensor) // channels * (-(-channels // 8) * 8)
