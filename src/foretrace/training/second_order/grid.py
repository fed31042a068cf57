"""Who keeps and computes what in distributed K-FAC: gradient workers, their groups, bytes that are held and sent.

Pauloski et al., KAISA (SC 2021), section 3. W workers stand in a grid of m rows and W / m columns, rank by rank. Every
layer belongs to a column: its m workers keep the layer's inverses and precondition its gradient, one of them
decomposes its factors, and each of them sends the result along its row. m / W is the gradient-worker fraction: 1 sends
inverses now and then and no gradient, 1 / W keeps every inverse once and sends all gradients in every step.

Arithmetic alone: a prediction and the preconditioner itself ask the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite, prod

from foretrace.errors import ForetraceError

BYTES = 4  # factors and inverses are float32
BUCKET_BYTES = 25 * 2**20  # factors are averaged together up to so much


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredLayer:
    """A layer whose gradient, a matrix of `outputs` x `inputs`, is preconditioned by two factors."""

    name: str
    inputs: int  # side of A: numbers that a unit reads, with 1 for a bias
    outputs: int  # side of G

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient."""
        return BYTES * self.inputs * self.outputs

    @property
    def factor_bytes(self) -> int:
        """Bytes of both factors as they are kept."""
        return BYTES * (self.inputs**2 + self.outputs**2)

    @property
    def packed_bytes(self) -> int:
        """Bytes of both factors as they are sent: a triangle each."""
        return BYTES * (triangle(self.inputs) + triangle(self.outputs))

    @property
    def inverse_bytes(self) -> int:
        """Bytes of eigenvectors of both factors and of what divides the gradient between them."""
        return self.factor_bytes + self.gradient_bytes

    @property
    def work(self) -> int:
        """What decomposing its factors grows with."""
        return self.inputs**3 + self.outputs**3


def unsupported(name: str, why: str) -> str:
    """Return why a layer cannot be preconditioned, without the name of the technique."""
    return f"the convolution {name} has {why}, for which K-FAC has no factors; add {name} to what to skip."


def skips(patterns: str, name: str) -> bool:
    """Return whether a layer is left out: by one of several globs, with commas between them."""
    return any(fnmatchcase(name, each.strip()) for each in patterns.split(",") if each.strip())


def factored(name: str, weight: tuple[int, ...], *, bias: bool) -> FactoredLayer:
    """Return a layer by the shape of its weight, (outputs, inputs) or (outputs, channels, height, width)."""
    return FactoredLayer(name=name, inputs=prod(weight[1:]) + bias, outputs=weight[0])


def triangle(side: int) -> int:
    """Return numbers in one half of a symmetric matrix with its diagonal."""
    return side * (side + 1) // 2


def fractions(workers: int) -> tuple[float, ...]:
    """Return every gradient-worker fraction of so many workers, memory-optimal first."""
    return tuple(m / workers for m in range(1, workers + 1) if workers % m == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondOrderTraffic:
    """Bytes that one worker hands to collectives, each time they are due."""

    factors: int  # all-reduced
    inverses: int  # broadcast in its column, sent and received
    gradients: int  # broadcast in its row, sent and received


@dataclass(frozen=True, kw_only=True)
class SecondOrderShares:
    """Layers shared out over workers. Made by `share_out`."""

    layers: tuple[FactoredLayer, ...]
    workers: int
    gradient_workers: int  # rows of the grid
    decomposing: tuple[int, ...]  # by layer: the rank that decomposes its factors

    @property
    def columns(self) -> int:
        """Groups of gradient workers."""
        return self.workers // self.gradient_workers

    @property
    def sends_inverses(self) -> bool:
        """Whether a layer has more than one gradient worker."""
        return self.gradient_workers > 1

    @property
    def sends_gradients(self) -> bool:
        """Whether a worker keeps some layers' inverses only."""
        return self.columns > 1

    def column(self, rank: int) -> tuple[int, ...]:
        """Return ranks that keep the same inverses as this one."""
        return tuple(range(rank % self.columns, self.workers, self.columns))

    def row(self, rank: int) -> tuple[int, ...]:
        """Return ranks that send each other preconditioned gradients."""
        first = rank - rank % self.columns
        return tuple(range(first, first + self.columns))

    def decomposes(self, rank: int) -> tuple[int, ...]:
        """Return layers whose factors a rank decomposes, by number."""
        return tuple(i for i, each in enumerate(self.decomposing) if each == rank)

    def preconditions(self, rank: int) -> tuple[int, ...]:
        """Return layers whose gradient a rank preconditions, by number."""
        return tuple(i for i, each in enumerate(self.decomposing) if each % self.columns == rank % self.columns)

    def held_bytes(self, rank: int) -> int:
        """Return bytes that a rank keeps between steps: all factors, and inverses of its layers."""
        return sum(each.factor_bytes for each in self.layers) + self._inverse_bytes(rank)

    def traffic(self, rank: int) -> SecondOrderTraffic:
        """Return what a rank hands to collectives."""
        several = self.workers > 1
        return SecondOrderTraffic(
            factors=several * sum(each.packed_bytes for each in self.layers),
            inverses=self.sends_inverses * self._inverse_bytes(rank),
            gradients=self.sends_gradients * sum(each.gradient_bytes for each in self.layers),
        )

    def buckets(self) -> list[list[int]]:
        """Return sides of the factors (A then G of every layer) that are averaged together."""
        found: list[list[int]] = []
        room = 0
        for side in (side for each in self.layers for side in (each.inputs, each.outputs)):
            size = BYTES * triangle(side)
            if not found or size > room:
                found.append([])
                room = BUCKET_BYTES
            found[-1].append(side)
            room -= size
        return found

    def bucket_bytes(self) -> list[int]:
        """Return bytes of the messages that average factors."""
        return [sum(BYTES * triangle(side) for side in sides) for sides in self.buckets()]

    def passing_bytes(self, read_bytes: int) -> int:
        """Return bytes that come and go in a step at most, where the largest layer reads so much (as rows of a matrix).

        The largest of four: taking new factors, averaging them, decomposing and sending, preconditioning.
        """
        factors = sum(each.factor_bytes for each in self.layers)
        gradients = sum(each.gradient_bytes for each in self.layers)
        largest = max(each.inverse_bytes for each in self.layers)
        sent = max(sum(self.layers[i].inverse_bytes for i in self.decomposes(rank)) for rank in range(self.workers))
        half = max(triangle(side) for each in self.layers for side in (each.inputs, each.outputs))
        several = self.workers > 1
        return max(
            factors + 3 * read_bytes,
            factors + several * (2 * max(self.bucket_bytes()) + 32 * half),  # with places of numbers, int64
            4 * largest + self.sends_inverses * sent,
            (2 + self.sends_gradients) * gradients + 3 * largest,
        )

    def _inverse_bytes(self, rank: int) -> int:
        return sum(self.layers[i].inverse_bytes for i in self.preconditions(rank))


def share_out(layers: Iterable[FactoredLayer], *, workers: int, fraction: float) -> SecondOrderShares:
    """Give layers to the column and then to the worker with the least to decompose, the largest first.

    Raises ForetraceError for a fraction that gives no whole grid.
    """
    rows = gradient_workers(workers, fraction)
    kept = tuple(layers)
    columns = workers // rows
    load = [0] * workers
    worker_of = [0] * len(kept)
    for i in sorted(range(len(kept)), key=lambda i: -kept[i].work):
        column = min(range(columns), key=lambda c: sum(load[c::columns]))
        worker_of[i] = min(range(column, workers, columns), key=load.__getitem__)
        load[worker_of[i]] += kept[i].work
    return SecondOrderShares(layers=kept, workers=workers, gradient_workers=rows, decomposing=tuple(worker_of))


def gradient_workers(workers: int, fraction: float) -> int:
    """Return gradient workers of a layer. Raises ForetraceError where they do not divide the workers."""
    rows = max(round(workers * fraction), 1) if isfinite(fraction) else 0
    if not 0 <= fraction <= 1 or workers % rows or abs(rows - max(workers * fraction, 1.0)) > 1e-3 * rows:
        listed = ", ".join(f"{each:.4g}" for each in fractions(workers))
        raise ForetraceError(f"fraction must be one of {listed} for {workers} workers, got {fraction:g}; choose one.")
    return rows
