"""Arguments that must agree with each other: what a forward operator left for its backward one.

A backward operator takes tensors that only the forward one can make: the workspace of a oneDNN layer, the logarithms
of an attention, the mean and deviation of a normalisation. Sizes and types of these depend on the inputs, and change
with them in a twin, so the forward operator runs once on the same inputs and its outputs take their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InconsistentError(ValueError):
    """Arguments that contradict each other, in an operator that would not notice and write over memory."""


def completed(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the positional arguments, those that a forward operator makes replaced by what it makes.

    Raises InconsistentError where an operator that checks nothing would be given arguments that do not fit together.
    """
    complete = _COMPLETE.get(name)
    return tuple(complete(args, kwargs) if complete else args)


def _rnn(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    x, w1, w2, _, _, hx, cx = args[:7]
    fits = x.ndim == 3 and w1.ndim == w2.ndim == hx.ndim == 2 and hx.shape == cx.shape
    fits = fits and hx.shape[0] == x.shape[1] and x.shape[2] == w1.shape[1] and hx.shape[1] == w2.shape[1]
    if not fits or w1.shape[0] != w2.shape[0]:
        raise InconsistentError("input, weights and state of the layer do not fit together")
    return args


def _rnn_backward(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    import torch

    _rnn(args, kwargs)
    reverse, mode, hidden, layers, has_biases, _, bidirectional, sizes, batch_first = args[13:22]
    rest = (reverse, sizes, mode, hidden, layers, has_biases, bidirectional, batch_first, True)
    with torch.enable_grad():  # without it the layer leaves no workspace
        output, hy, cy, workspace = torch.ops.aten.mkldnn_rnn_layer(*args[:7], *rest)
    return [*args[:7], output, hy, cy, *args[10:22], workspace]


def _attention_backward(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    import torch

    grad, q, k, v = args[:4]
    dropout, causal = args[6:8]
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = forward(q, k, v, dropout, causal, **kwargs)
    return [grad, q, k, v, out, logsumexp, *args[6:]]


def _layer_norm_backward(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    import torch

    x, shape, weight, bias = args[1], args[2], args[5], args[6]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, 1e-5)
    return [*args[:3], mean, rstd, *args[5:]]


def _batch_norm_backward(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    import torch

    x, weight, mean, var, train, eps = args[1], args[2], args[3], args[4], args[7], args[8]
    _, save_mean, save_invstd = torch.ops.aten.native_batch_norm(x, weight, weight, mean, var, train, 0.0, eps)
    return [*args[:5], save_mean, save_invstd, *args[7:]]


def _ctc(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return lengths that fit: whole inputs, whole targets."""
    import torch

    log_probs, targets = args[:2]
    steps, batch, classes = (
        (*log_probs.shape, 1)[:3] if log_probs.dim() == 3 else (log_probs.shape[0], 1, log_probs.shape[1])
    )
    length = targets.shape[1] if targets.dim() == 2 else targets.numel() // max(batch, 1)
    made = torch.randint(1, max(classes, 2), targets.shape, dtype=targets.dtype)
    return [log_probs.log_softmax(-1), made, _lengths(args[2], steps), _lengths(args[3], min(length, steps)), *args[4:]]


def _ctc_backward(args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    import torch

    grad, log_probs, targets, inputs, lengths = args[:5]
    blank = args[7]
    log_probs, targets, inputs, lengths = _ctc([log_probs, targets, inputs, lengths], {})[:4]
    loss, alpha = torch.ops.aten._ctc_loss(log_probs, targets, inputs, lengths, blank)
    return [grad, log_probs, targets, inputs, lengths, loss, alpha, *args[7:]]


def _lengths(like: Any, value: int) -> Any:
    import torch

    return torch.full_like(like, value) if isinstance(like, torch.Tensor) else [value] * len(like)


_COMPLETE: dict[str, Callable[[list[Any], dict[str, Any]], list[Any]]] = {
    "aten::mkldnn_rnn_layer": _rnn,
    "aten::mkldnn_rnn_layer_backward": _rnn_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::_ctc_loss": _ctc,
    "aten::_ctc_loss_backward": _ctc_backward,
}
