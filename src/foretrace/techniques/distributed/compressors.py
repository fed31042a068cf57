"""What methods of gradient compression send for a bucket, and what encoding and decoding it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.operators.operator import Operator
from foretrace.techniques.base import Prior
from foretrace.training.compression.settings import CompressionSettings, kept
from foretrace.training.compression.timing import ALL, ENCODE, hook_operator

METHODS = ("fp16", "bf16", "powersgd", "topk", "randomk", "sign", "dgc")
_BITS_32 = 4  # bytes of a value and of an index

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCollective:
    """One collective of a bucket. `nbytes` as `cost.network` counts them, `sent` what one worker contributes."""

    kind: CollectiveKind
    nbytes: float
    sent: float


def parts(settings: CompressionSettings, shapes: Shapes, workers: int) -> tuple[CompressedCollective, ...]:
    """Return the collectives of a bucket of float32 gradients, one after the other."""
    elements = sum(prod(shape) for shape in shapes)
    match settings.method:
        case "fp16" | "bf16":
            return (_reduced(2 * elements),)
        case "powersgd":
            plain, p, q = low_rank(shapes, settings.rank, settings.min_rate)
            return tuple(_reduced(_BITS_32 * each) for each in (plain, p, q))
        case "randomk":
            return (_reduced(_BITS_32 * kept(elements, settings.share)),)
        case "topk" | "dgc":
            each = _gathered(_BITS_32 * kept(elements, settings.share), workers)
            return each, each  # values and indices
        case "sign":
            return (_gathered(-(-elements // 8) + _BITS_32, workers),)
    raise ValueError(f"no method {settings.method}")


def low_rank(shapes: Shapes, rank: int, min_rate: float) -> tuple[int, int, int]:
    """Return numbers that PowerSGD sends of tensors [n, m...]: uncompressed ones, P (n r), Q (m r).

    The rule of PyTorch's hook: r is at most n and m, and a tensor is sent as it is unless it shrinks by more than
    `min_rate` (Vogels et al., NeurIPS 2019, algorithm 1; `powerSGD_hook._should_compress`).
    """
    plain = p = q = 0
    for shape in shapes:
        elements = prod(shape)
        n = shape[0] if shape else 1
        m = elements // n if n else 0
        r = min(n, m, rank)
        if (n + m) * r * min_rate < elements:
            p, q = p + n * r, q + m * r
        else:
            plain += elements
    return plain, p, q


def ratio(settings: CompressionSettings, shapes: Shapes, workers: int = 2) -> float:
    """Return bytes of float32 gradients relative to what one worker sends."""
    elements = sum(prod(shape) for shape in shapes)
    return _BITS_32 * elements / sum(part.sent for part in parts(settings, shapes, workers))


def wanted(settings: CompressionSettings, buckets: Sequence[Shapes], workers: int, device: str) -> tuple[Operator, ...]:
    """Return the real hook on every bucket, to be timed alone: up to where it returns, and all of it."""
    pairs = [
        hook_operator(settings, list(shapes), workers, part, device) for shapes in buckets for part in (ENCODE, ALL)
    ]
    return tuple(dict.fromkeys(pairs))


def rates(settings: CompressionSettings, workers: int, *, cpu: bool) -> tuple[Prior, Prior]:
    """Return gradient bytes per second that a device encodes and decodes, before anyone timed it."""
    where = "one core" if cpu else "a data-centre GPU"
    why = f"{where} handles {settings.method} so fast, {'timed on one machine' if cpu else 'as was published for V100'}"
    encode, decode = (_CPU if cpu else _GPU)[settings.method]
    gathered = workers / 2 if settings.method in ("sign", "topk", "dgc") else 1.0
    if settings.method == "powersgd":
        encode, decode = (each / max(settings.rank / 4, 1) ** 0.6 for each in (encode, decode))
    decode /= gathered if settings.method == "sign" else 1.0

    def prior(value: float) -> Prior:
        return Prior(value, value / 2.5, value * 2.5, unit="GB/s", why=why)

    return prior(encode), prior(decode)


# GB/s of float32 gradients, encoding and decoding.
# CPU: `make reproduce NAME=compression_utility`. GPU: coding of ResNet-50's 102 MB on V100, quoted from
# Agarwal et al., MLSys 2022 (not checked against the paper): PowerSGD rank 4 45 ms, top-k 289 ms, sign 16 ms.
_CPU = {
    "fp16": (5.0, 10.0),
    "bf16": (5.0, 10.0),
    "powersgd": (1.6, 0.8),
    "topk": (0.2, 2.0),
    "randomk": (0.15, 3.0),
    "sign": (1.1, 0.5),
    "dgc": (0.25, 2.0),
}
_GPU = {
    "fp16": (300.0, 300.0),
    "bf16": (300.0, 300.0),
    "powersgd": (5.0, 4.0),
    "topk": (0.4, 3.0),
    "randomk": (2.0, 20.0),
    "sign": (12.0, 12.0),
    "dgc": (0.4, 3.0),
}


def _reduced(nbytes: float) -> CompressedCollective:
    return CompressedCollective(kind=CollectiveKind.ALL_REDUCE, nbytes=nbytes, sent=nbytes)


def _gathered(nbytes: float, workers: int) -> CompressedCollective:
    return CompressedCollective(kind=CollectiveKind.ALL_GATHER, nbytes=nbytes * workers, sent=nbytes)
