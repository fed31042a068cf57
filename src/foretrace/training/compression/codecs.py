"""Encoders and decoders of tensors: what is sent, and what the receiver makes of it. Nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SEED = 0x9E3779B97F4A7C15  # spreads step and bucket over the seeds of a generator
_PLACES = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def top_k(flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k elements of largest magnitude of [n]: values [k] and indices [k], int32."""
    indices = torch.topk(flat.abs(), k, sorted=False).indices
    return flat[indices], indices.to(torch.int32)


def random_indices(elements: int, k: int, *, step: int, bucket: int, device: torch.device | str = "cpu") -> Tensor:
    """Return K distinct indices below `elements`, the same on every worker for the same step and bucket; [k], int64."""
    generator = torch.Generator(device=device)
    generator.manual_seed((_SEED * (step + 1) + bucket) % (1 << 63))
    return torch.randperm(elements, generator=generator, device=device)[:k]


def random_k(flat: Tensor, k: int, *, step: int, bucket: int) -> tuple[Tensor, Tensor]:
    """Return K random elements of [n], the same ones on every worker: values [k] and indices [k]."""
    indices = random_indices(flat.numel(), k, step=step, bucket=bucket, device=flat.device)
    return flat[indices], indices


def scattered(values: Tensor, indices: Tensor, elements: int) -> Tensor:
    """Return [n] with values added at their indices and 0 elsewhere."""
    return values.new_zeros(elements).index_add_(0, indices, values)


def pack_signs(flat: Tensor) -> Tensor:
    """Return one bit per element of [n], set where it is not negative: [ceil(n / 8)], uint8."""
    bits = flat >= 0
    short = -bits.numel() % 8
    if short:
        bits = torch.cat([bits, bits.new_zeros(short)])
    return (bits.view(-1, 8) * _PLACES.to(bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, elements: int) -> Tensor:
    """Return −1 or 1 per element: [n], int8."""
    bits = packed.unsqueeze(1).bitwise_and(_PLACES.to(packed.device)).ne_(0).to(torch.int8)
    return bits.view(-1)[:elements].mul_(2).sub_(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """A tensor as equally spaced levels between its least and its largest value."""

    packed: Tensor  # [ceil(n bits / 8)], uint8: 8 / bits levels per byte
    low: Tensor  # [], value of level 0
    step: Tensor  # [], between two levels
    bits: int
    shape: torch.Size


def quantise(x: Tensor, bits: int) -> Levels:
    """Return every element as the nearest of 2^bits levels; no element is off by more than half a step. bits: 2, 4 or
    8.
    """
    flat = x.reshape(-1)
    low, high = torch.aminmax(flat)
    step = (high - low) / (2**bits - 1)
    divisor = torch.where(step > 0, step, torch.ones_like(step))
    levels = flat.sub(low).div_(divisor).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return Levels(packed=_packed(levels, bits), low=low, step=step, bits=bits, shape=x.shape)


def dequantise(levels: Levels) -> Tensor:
    """Return the values of the levels, in their shape."""
    flat = _unpacked(levels.packed, levels.bits, levels.shape.numel())
    return flat.to(levels.step.dtype).mul_(levels.step).add_(levels.low).view(levels.shape)


def _packed(levels: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return levels
    many = 8 // bits
    short = -levels.numel() % many
    if short:
        levels = torch.cat([levels, levels.new_zeros(short)])
    columns = levels.view(-1, many)
    packed = columns[:, 0].clone()
    for i in range(1, many):
        packed.bitwise_or_(columns[:, i].bitwise_left_shift(i * bits))
    return packed


def _unpacked(packed: Tensor, bits: int, elements: int) -> Tensor:
    if bits == 8:
        return packed
    mask = 2**bits - 1
    columns = [packed.bitwise_right_shift(i * bits).bitwise_and_(mask) for i in range(8 // bits)]
    return torch.stack(columns, dim=1).view(-1)[:elements]
