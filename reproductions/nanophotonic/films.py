"""Thin films on glass: their reflectance by transfer matrices, and the search for thicknesses that give a spectrum."""

from __future__ import annotations

from collections.abc import Sequence
from math import asin, cos, factorial, pi, sin
from random import Random
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.compiled import njit
from foretrace.errors import ForetraceError
from foretrace.search.space import Choices, Problem, Responded

HIGH, LOW, GLASS = 2.35, 1.45, 1.52  # refractive indices of titania, silica and the substrate
WAVELENGTHS = np.linspace(400.0, 800.0, 81)  # nm
LAYERS = 8
THICKNESS = tuple(range(20, 221))  # nm
LEARNED = (20, 120)  # nm that lessons are of
STEP = 20  # nm that a neighbour differs by at most


def reflectance(
    thickness: Float64, wavelengths: Float64, indices: Sequence[float], *, angle: float = 0.0, polarization: str = "s"
) -> Float64:
    """The share of light that stacks of lossless layers reflect (designs x wavelengths).

    Characteristic matrices (Macleod, Thin-Film Optical Filters, section 2.6). `thickness`: designs x layers, in the
    unit of the wavelengths; `indices`: from where light comes, the layers, the substrate; `angle`: of incidence, rad.
    """
    tilt = [cos(asin(indices[0] * sin(angle) / index)) for index in indices]
    admittance = [n * c if polarization == "s" else n / c for n, c in zip(indices, tilt, strict=True)]
    path = np.array([2 * pi * n * c for n, c in zip(indices[1:-1], tilt[1:-1], strict=True)])
    out = np.empty((len(thickness), len(wavelengths)))
    _reflectance(np.ascontiguousarray(thickness), 1 / wavelengths, path, np.array(admittance), out)
    return out


# Of sine and cosine in powers of the square, highest first: to 1e-15 within a quarter turn.
_SINE = tuple((-1.0) ** m / factorial(2 * m + 1) for m in range(10, -1, -1))
_COSINE = tuple((-1.0) ** m / factorial(2 * m) for m in range(10, -1, -1))


@njit()
def _reflectance(thickness: Float64, waves: Float64, path: Float64, admittance: Float64, out: Float64) -> None:
    """Without losses, E is a + ib and H is ic + d with real numbers that go two and two through a layer.

    Half a turn of the phase changes the signs of all, which no share of light depends on: it is left out.
    """
    first, last, many = admittance[0], admittance[-1], len(waves)
    a, b, c, d = np.empty(many), np.empty(many), np.empty(many), np.empty(many)
    for i in range(out.shape[0]):
        a[:], b[:], c[:], d[:] = 1.0, 0.0, 0.0, last
        for k in range(len(path) - 1, -1, -1):
            whole, y = path[k] * thickness[i, k], admittance[k + 1]
            for j in range(many):  # one loop without calls, which the compiler turns into wide instructions
                phase = whole * waves[j]
                phase -= np.floor(phase / pi + 0.5) * pi
                square, even, odd = phase * phase, 0.0, 0.0
                for each in _COSINE:
                    even = even * square + each
                for each in _SINE:
                    odd = odd * square + each
                up, down = odd * phase * y, odd * phase / y
                a[j], c[j] = even * a[j] - down * c[j], even * c[j] + up * a[j]
                b[j], d[j] = even * b[j] + down * d[j], even * d[j] - up * b[j]
        for j in range(many):
            less, more = (first * a[j] - d[j], first * b[j] - c[j]), (first * a[j] + d[j], first * b[j] + c[j])
            out[i, j] = (less[0] ** 2 + less[1] ** 2) / (more[0] ** 2 + more[1] ** 2)


def indices(layers: int) -> tuple[float, ...]:
    """Air, titania and silica in turns, glass."""
    return (1.0, *((HIGH, LOW)[i % 2] for i in range(layers)), GLASS)


class Films(Choices):
    """Thicknesses in nm; a neighbour has one layer a little thicker or thinner."""

    def neighbour(self, point: tuple[Any, ...], rng: Random) -> tuple[Any, ...]:
        i = rng.randrange(len(point))
        other = point[i] + rng.choice((-1, 1)) * rng.randint(1, STEP)
        low, high = self.values[i][0], self.values[i][-1]
        return (*point[:i], min(max(other, low), high), *point[i + 1 :])


class Film(Problem[tuple[Any, ...]]):
    """The film whose reflectance is nearest to a target: root of the mean squared error over wavelengths."""

    bound = 0.0

    def __init__(self, target: Sequence[float], *, layers: int = LAYERS, learned: tuple[int, int] = LEARNED) -> None:
        """Raises ForetraceError for a target that has not one share of light for every wavelength."""
        if len(target) != len(WAVELENGTHS) or not all(0 <= each <= 1 for each in target):
            raise ForetraceError(
                f"a target must have {len(WAVELENGTHS)} shares from 0 to 1, of {WAVELENGTHS[0]:g} to "
                f"{WAVELENGTHS[-1]:g} nm, got {len(target)} from {min(target, default=0):g} to "
                f"{max(target, default=0):g}; give one for every 5 nm."
            )
        self.target_response = tuple(map(float, target))
        self.space, self.learned = Films((THICKNESS,) * layers), learned
        self._indices = indices(layers)

    def lesson(self, rng: Random) -> tuple[int, ...]:
        return tuple(rng.randint(*self.learned) for _ in self._indices[1:-1])

    def costs(self, points: Sequence[tuple[Any, ...]]) -> list[float]:
        found = reflectance(np.array(points, dtype=np.float64), WAVELENGTHS, self._indices)
        errors = np.sqrt(((found - np.array(self.target_response)) ** 2).mean(axis=1))
        return [Responded(error, row) for error, row in zip(errors.tolist(), found.tolist(), strict=True)]
