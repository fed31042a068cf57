"""`Accelerator`: a chip that need not exist: systolic tensor cores, vector cores, one on-chip buffer, HBM, links.

Its text is taken wherever the name of a device is: `accelerator:tc=8x128x128,vc=2x128,buffer=128MB`. What is left out
is `TPU_LIKE`'s. Areas are sums of the 30 terms of the component tables of PHAZE (Wang et al., ICML 2024; the
repository msr-fiddle/phaze, MIT license): least squares over its 29,360 designs, all met to 2e-12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite

from foretrace import shipped
from foretrace.errors import ForetraceError
from foretrace.hardware.device import DESIGNED, Device
from foretrace.names import keyed

MB = 1 << 20  # of a buffer: they come in powers of two
WORD = 2  # bytes of a number: bf16
MOST_CORES, LARGEST_SIDE = 1 << 16, 1 << 12
MAPPED_PORTS = 256  # words a cycle: what PHAZE gives the mapper that it calls


@dataclass(frozen=True, kw_only=True)
class AreaTerm:
    """Area of one component of this size, µm² in 45 nm."""

    term: str  # tensor_core by multipliers, vector_core by lanes, global_buffer by bytes
    argument: int
    area: float


@cache
def area_terms() -> dict[tuple[str, int], float]:
    """Return the area by component and size."""
    return {(each.term, each.argument): each.area for each in shipped.rows("foretrace.hardware", "area.csv", AreaTerm)}


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A design. Raises ForetraceError for sizes that no chip can have."""

    tensor_cores: int = 8
    width: int = 128  # rows of each systolic array
    depth: int = 128  # its columns
    vector_cores: int = 2
    lanes: int = 128  # of each vector core
    buffer: int = 128 * MB  # bytes, shared by all cores
    ports: int = 4096  # words a cycle that all cores together read from the buffer and write to it
    hbm_gb: float = 32.0
    hbm_gb_s: float = 1200.0
    link_gb_s: float = 50.0  # to other devices, in each direction
    clock_ghz: float = 1.05

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            most = {"width": LARGEST_SIDE, "depth": LARGEST_SIDE, "tensor_cores": MOST_CORES,
                    "vector_cores": MOST_CORES, "lanes": MOST_CORES}.get(each.name, 1 << 50)  # fmt: skip
            if not (isfinite(value) and 0 < value <= most):
                raise ForetraceError(
                    f"{each.name.replace('_', ' ')} of an accelerator must be above 0 and at most {most}, got "
                    f"{value}; give {most if value > most else 1}."
                )
        if self.buffer < self.tile_bytes:
            raise ForetraceError(
                f"the buffer of an accelerator must hold one tile of its {self.width}x{self.depth} arrays, "
                f"{self.tile_bytes} bytes, got {self.buffer}; give a larger buffer or smaller arrays."
            )

    @property
    def tile_bytes(self) -> int:
        """What one core works on: a tile of weights, a row in and a row out, twice: one is loaded ahead."""
        return 2 * WORD * (self.width * self.depth + self.width + self.depth)

    @property
    def area(self) -> float:
        """µm² in 45 nm, of cores and buffer. Raises ForetraceError for sizes that no table has."""
        terms, total = area_terms(), 0.0
        for term, size, count in (
            ("tensor_core", self.width * self.depth, self.tensor_cores),
            ("vector_core", self.lanes, self.vector_cores), ("global_buffer", self.buffer, 1),
        ):  # fmt: skip
            if (term, size) not in terms:
                sizes = sorted(argument for name, argument in terms if name == term)
                near = min(sizes, key=lambda each: abs(each - size))
                raise ForetraceError(
                    f"the area of a {term.replace('_', ' ')} is known for sizes {sizes[0]} to {sizes[-1]} in powers of "
                    f"two, got {size}; give {near}."
                )
            total += count * terms[term, size]
        return total

    @property
    def peak_flops(self) -> float:
        """FLOP/s of products."""
        return 2e9 * self.tensor_cores * self.width * self.depth * self.clock_ghz

    def array(self) -> tuple[float, ...]:
        """Return it as `cost.accelerators.kernels` takes it."""
        return (self.tensor_cores, self.width, self.depth, self.vector_cores * self.lanes, self.buffer, self.ports,
                self.clock_ghz * 1e9)  # fmt: skip

    def __str__(self) -> str:
        said = [f"tc={self.tensor_cores}x{self.width}x{self.depth}", f"vc={self.vector_cores}x{self.lanes}"]
        said.append(f"buffer={f'{self.buffer // MB}MB' if self.buffer % MB == 0 else self.buffer}")
        for key, (name, unit) in _MORE.items():
            if (value := getattr(self, name)) != getattr(TPU_LIKE, name):
                said.append(f"{key}={value:.12g}{unit}")
        return DESIGNED + ",".join(said)

    def device(self) -> AcceleratorDevice:
        """Return it as a device of the catalog; products of all precisions run in bf16."""
        rate = self.peak_flops / 1e12
        return AcceleratorDevice(
            name=str(self), short=str(self), vendor="designed", arch="systolic", fp32_tflops=rate, fp16_tflops=rate,
            bf16_tflops=rate, memory_gb_s=self.hbm_gb_s, memory_gb=self.hbm_gb, sms=self.tensor_cores,
            l2_mb=self.buffer / MB, boost_mhz=1e3 * self.clock_ghz, scaleup_link="link",
            scaleup_gb_s=2 * self.link_gb_s, node_devices=1, network_gb_s=self.link_gb_s, source="designed",
            design=self,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorDevice(Device):
    """A design where a device is asked for."""

    design: Accelerator


# `TPU_LIKE` is what PHAZE calls like a TPU v4, the limit of its search; memory of a TPU v4 (Jouppi et al., 2023).
_MORE = {
    "ports": ("ports", ""), "hbm": ("hbm_gb", "GB"), "bandwidth": ("hbm_gb_s", "GB/s"), "link": ("link_gb_s", "GB/s"),
    "clock": ("clock_ghz", "GHz"),
}  # fmt: skip
TPU_LIKE = Accelerator()
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z/]*)", re.IGNORECASE)
_BYTES = {"": 1, "b": 1, "kb": 1 << 10, "kib": 1 << 10, "mb": MB, "mib": MB, "gb": 1 << 30, "gib": 1 << 30}
_FORM = "accelerator:tc=8x128x128,vc=2x128,buffer=128MB"


def accelerator(text: str) -> Accelerator:
    """Return a named design, e.g. "accelerator:tc=8x128x128,vc=2x128,buffer=128MB". Raises ForetraceError."""
    words = [each.strip() for each in text[len(DESIGNED) :].split(",") if each.strip()]
    given = keyed(words, ("tc", "vc", "buffer", *_MORE), "accelerator:")
    found: dict[str, float] = {}
    for key, names in (("tc", ("tensor_cores", "width", "depth")), ("vc", ("vector_cores", "lanes"))):
        if key in given:
            sizes = given[key].lower().replace("×", "x").split("x")
            if len(sizes) != len(names) or not all(each.isdigit() and len(each) < 9 for each in sizes):
                raise ForetraceError(
                    f"{key}= of an accelerator must be {len(names)} whole numbers joined by x, got {given[key]!r}; "
                    f"write {_FORM}."
                )
            found |= dict(zip(names, map(int, sizes), strict=True))
    for key, (name, unit) in (("buffer", ("buffer", "")), *_MORE.items()):
        if key not in given:
            continue
        number = _NUMBER.fullmatch(given[key].strip())
        units = _BYTES if key == "buffer" else {"": 1, unit.lower(): 1}
        if not number or number[2].lower() not in units:
            raise ForetraceError(
                f"{key}= of an accelerator must be a number{f' of {unit}' if unit else ''}, got {given[key]!r}; write "
                f"{_FORM}."
            )
        value = float(number[1]) * units[number[2].lower()]
        found[name] = round(value) if name in ("buffer", "ports") and isfinite(value) else value
    return Accelerator(**found)  # type: ignore[arg-type]
