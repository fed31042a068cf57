"""Wave scaling, the rule of Habitat (Yu et al., ATC 2021, section 3.3) that ours is compared with.

Bandwidth, clock and number of multiprocessors, weighted by how memory-bound a kernel is. It knows nothing of tensor
cores or of other vendors' units.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Precision
from foretrace.cost.devices.roofline import peak_flops
from foretrace.hardware.devices import Device

Float64 = npt.NDArray[np.float64]


def memory_boundedness(flops: Float64, nbytes: Float64, ridge: float) -> Float64:
    """Habitat's gamma (n rows): 1 for a kernel that only moves data, 0.5 at the ridge (FLOP per byte), then to 0."""
    intensity = flops / np.maximum(nbytes, 1.0)
    return np.where(intensity <= ridge, 1 - 0.5 * intensity / ridge, 0.5 * ridge / np.maximum(intensity, 1e-30))


def wave_scaling(
    seconds: Float64,
    flops: Float64,
    nbytes: Float64,
    source: Device,
    target: Device,
    *,
    blocks: Float64 | None = None,
    blocks_per_sm: tuple[Float64, Float64] | None = None,
) -> Float64:
    """Habitat's rule for kernels that stay alike on both devices (n rows), section 3.3.

    `blocks` is the grid (0 where unknown) and `blocks_per_sm` how many of them a multiprocessor of either device holds
    (see `occupancy`; 1 each without it): a kernel that fills no wave on both devices scales by its number of waves.
    """
    gamma = memory_boundedness(flops, nbytes, peak_flops(target, Precision.FP32) / (target.memory_gb_s * 1e9))
    clock = source.boost_mhz / target.boost_mhz
    bandwidth = source.memory_gb_s / target.memory_gb_s
    scaled = seconds * bandwidth**gamma * (clock * source.sms / target.sms) ** (1 - gamma)
    if blocks is None:
        return np.asarray(scaled, dtype=np.float64)
    held = blocks_per_sm or (np.ones(len(seconds)), np.ones(len(seconds)))
    wave = [np.maximum(each, 1) * device.sms for each, device in zip(held, (source, target), strict=True)]
    small = (blocks > 0) & (blocks < wave[0]) & (blocks < wave[1])
    rounds = [np.ceil(np.maximum(blocks, 1) / device.sms) for device in (source, target)]
    few = seconds * (clock * rounds[1] / rounds[0]) ** (1 - gamma)
    return np.asarray(np.where(small, few, scaled), dtype=np.float64)


# Per multiprocessor of CUDA devices (CUDA C++ Programming Guide, table of compute capabilities): threads, blocks,
# registers, bytes of shared memory.
_LIMITS = {
    "Kepler": (2048, 16, 131_072, 112 << 10), "Pascal": (2048, 32, 65_536, 64 << 10),
    "Volta": (2048, 32, 65_536, 96 << 10), "Turing": (1024, 16, 65_536, 64 << 10),
    "Ampere": (2048, 32, 65_536, 164 << 10), "Ada": (1536, 24, 65_536, 100 << 10),
    "Hopper": (2048, 32, 65_536, 228 << 10), "Blackwell": (2048, 32, 65_536, 228 << 10),
}  # fmt: skip


def occupancy(device: Device, threads: Float64, registers: Float64, shared_bytes: Float64) -> Float64:
    """Blocks that one multiprocessor holds at a time (n rows), at least 1; 1 for devices whose limits are unknown.

    `threads` per block, `registers` per thread, `shared_bytes` per block.
    """
    limits = _LIMITS.get(device.arch.split()[0] if device.arch else "")
    if limits is None:
        return np.ones(len(threads))
    most_threads, most_blocks, most_registers, most_shared = limits
    warps = np.ceil(np.maximum(threads, 1) / 32)
    per_block = warps * np.ceil(np.maximum(registers, 1) * 32 / 256) * 256  # registers come in units of 256 per warp
    found = np.minimum(most_threads // (warps * 32), most_registers // per_block)
    found = np.minimum(found, np.where(shared_bytes > 0, most_shared // np.maximum(shared_bytes, 1), most_blocks))
    return np.asarray(np.maximum(np.minimum(found, most_blocks), 1.0), dtype=np.float64)
