"""Operators as a GPU would be given them, while a model's sizes are worked out without one.

PyTorch decides inside composite functions, by the device of their inputs, which operators to call. Fake tensors stand
for tensors of a processor here, so the functions below are put in the place of those composites for as long as a
capture lasts:

- attention: one fused call, flash attention for 16 bit without a mask, memory-efficient attention otherwise
  (`scaled_dot_product_attention`, as its documentation orders them), keys and values repeated for it where heads share
  them (PyTorch then falls back to separate products, which a user of float32 on a GPU hardly wants);
  or two products around a softmax, where `attention` is "separate";
- dropout: `native_dropout` in one kernel;
- recurrent layers: `_cudnn_rnn`, all layers and directions in one call;
- optimizers: the implementation that is asked for (`UPDATES`); else the one that they were made with, and `foreach`
  where they name none;
- `torch.autocast` for a GPU: that of the processor whose tensors stand for the GPU's. Meta tensors are seen by none.

Batch normalisation stays `native_batch_norm` (cuDNN's own operator computes and moves the same), convolutions stay
`aten::convolution`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from foretrace.errors import ForetraceError
from foretrace.model.capture.light import replaced

ATTENTION = ("fused", "flash-1", "separate")
UPDATES = ("fused", "foreach", "for-loop")  # implementations of an update, as torch.optim names them


class NeedsFake(Exception):
    """What is captured cannot be seen on meta tensors, and can on fake ones."""


@contextmanager
def operators_of(
    like: Literal["gpu", "cpu"],
    optimizers: Sequence[Any],
    *,
    meta: bool = False,
    update: str = "",
    attention: str = "",
) -> Iterator[None]:
    """Send calls to the operators of that kind of device. Not for several threads at once.

    With `meta` tensors, entering `torch.autocast` raises NeedsFake.
    """
    if like == "cpu":
        yield
        return
    import torch
    from torch import _VF
    from torch.nn import functional

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if update:
                _implement(optimizer, group, update)
            elif group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
    places: list[tuple[Any, str, Any]] = [
        (functional, "scaled_dot_product_attention", _separate if attention == "separate" else _attention),
        (_VF, "dropout", _dropout),
        (torch, "dropout", _dropout),
        (_VF, "lstm", _recurrent(2)),
        (_VF, "gru", _recurrent(3)),
        (_VF, "rnn_relu", _recurrent(0)),
        (_VF, "rnn_tanh", _recurrent(1)),
        (torch.autocast, "__init__", _autocast_begun(torch.autocast.__init__)),
        (torch.autocast, "__enter__", _autocast_entered(torch.autocast.__enter__, meta=meta)),
    ]
    # Tensors without data are on none of the devices that fused updates are for.
    check = "_device_dtype_check_for_fused"
    homes = [sys.modules[f"torch.optim.{name}"] for name in ("adam", "sgd", "adagrad")]
    places += [(home, check, lambda *_, **__: None) for home in homes if hasattr(home, check)]
    with replaced(places):
        yield


def _implement(optimizer: Any, group: dict[str, Any], update: str) -> None:
    """Have a group of parameters updated so. Raises ForetraceError where the optimizer has no such implementation."""
    key = {"for-loop": "foreach"}.get(update, update)
    if key not in group:
        name = type(optimizer).__name__
        raise ForetraceError(f"{name} has no {update} implementation; leave out `optimizer={update}`.")
    group["fused"], group["foreach"] = update == "fused", update == "foreach"
    if update == "fused":
        optimizer._step_supports_amp_scaling = True  # as its constructor has it


def _autocast_begun(original: Any) -> Any:
    """Return `autocast.__init__` that takes the tensors of this capture for those of the device that is named."""

    def begun(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **more: Any) -> None:
        import torch

        if device_type != "cpu":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device_type)
        original(self, device_type, dtype, enabled, **more)

    return begun


def _autocast_entered(original: Any, *, meta: bool) -> Any:
    def entered(self: Any) -> Any:
        if meta and self._enabled:
            raise NeedsFake
        return original(self)

    return entered


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    import torch

    aten = torch.ops.aten
    half = query.dtype in (torch.float16, torch.bfloat16)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        half = True
    if query.dim() == 3:  # without heads
        found = _attention(query[:, None], key[:, None], value[:, None], attn_mask, dropout_p, is_causal, scale)
        return found[:, 0]
    if half and attn_mask is None:  # heads of keys and values may be fewer
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa:
        key, value = _repeated(query, key), _repeated(query, value)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale
    )[0]


def _separate(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Return attention as two products around a softmax, which scales and masks (Megatron-LM before fused ones)."""
    import torch

    if enable_gqa:
        key, value = _repeated(query, key), _repeated(query, value)
    scores = torch.matmul(query, key.transpose(-2, -1))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    return torch.matmul(_dropout(torch.softmax(scores, -1), dropout_p, dropout_p > 0), value)


def _repeated(query: Any, tensor: Any) -> Any:
    """Return every head of keys or values beside those queries that share it."""
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


def _dropout(input: Any, p: float, train: bool) -> Any:  # the name of the original
    import torch

    if not train or p == 0.0:
        return input
    if p == 1.0:
        return torch.zeros_like(input)
    return torch.native_dropout(input, p, True)[0]


def _recurrent(kind: int) -> Any:
    """Return `torch.lstm` and its kin by cuDNN; `kind` is cuDNN's number (0 ReLU, 1 tanh, 2 LSTM, 3 GRU)."""

    def run(*arguments: Any) -> Any:
        import torch

        packed = isinstance(arguments[2], torch.Tensor) and not isinstance(arguments[2], bool)
        if packed and not isinstance(arguments[1], tuple | list):
            x, sizes, state, weights, biased, layers, dropout, train, both = arguments[:9]
            first, steps = False, sizes.tolist()
        else:
            x, state, weights, biased, layers, dropout, train, both, first = arguments[:9]
            steps = []
        h, c = state if kind == 2 else (state, None)
        stride = (4 if biased else 2) + (1 if kind == 2 and _projected(weights, biased) else 0)
        hidden = c.shape[-1] if c is not None and stride in (3, 5) else h.shape[-1]
        width = h.shape[-1] if stride in (3, 5) else 0
        out, hy, cy, _, _ = torch.ops.aten._cudnn_rnn(
            x, list(weights), stride, None, h, c, kind, hidden, width, layers, first, dropout, train, both, steps, None
        )
        return (out, hy, cy) if kind == 2 else (out, hy)

    return run


def _projected(weights: Sequence[Any], biased: bool) -> bool:
    each = 5 if biased else 3
    return len(weights) % each == 0 and weights[each - 1].dim() == 2
