"""`codesign`: the best accelerator for a transformer, with the best plan on each: every design times every plan.

PHAZE (Wang et al., ICML 2024) searches the same designs; its stated rule and link are baselines here. Plans are tensor
degree, sequence parallelism, stages, data degree, micro-batch and recomputation. Of recomputations that fit, less is
never slower and is the only one priced; ZeRO 1 moves the same bytes and updates less, so that data degrees above 1 have
it; without gradients sequence parallelism sends nothing more, so that tensor degrees above 1 have it. So the best is
proven within the model: nothing of the space is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, log
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.accelerators import kernels as designed
from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import MB, TPU_LIKE, Accelerator, area_terms
from foretrace.plan.codesign import kernels
from foretrace.plan.transformers import kernels as plans_of
from foretrace.plan.transformers.model import (
    DESIGNED,
    Parallelism,
    configuration_of,
    constant_vector,
    fields_of,
    on_design,
    vector,
)
from foretrace.plan.transformers.shape import TransformerSizes
from foretrace.plan.transformers.space import divisors
from foretrace.search.space import Choices, Infeasible, Problem

SIZES = ("tensor_cores", "width", "depth", "vector_cores", "lanes", "buffer")  # of an `Accelerator`
CHOSEN = tuple(each for each in SIZES if each != "lanes")  # lanes are as wide as the arrays
LEAST_SHARE = 0.3  # of the area that is allowed: smaller designs count only with one core of a kind, as published
# pJ of a multiplication with its addition, of a word across the ports, of a word across the memory, of an operation of
# a lane: Horowitz, ISSCC 2014 (45 nm; 16 bits; a bank of 1 MB); O'Connor et al., MICRO 2017 (HBM2, 3.9 pJ/bit).
PJ = (1.5, 25.0, 62.4, 1.5)
ENERGY_RANGE = (0.5, 2.0)  # of it: sizes of banks, wires, other processes; leakage and links are not counted
_POWERS = [1 << i for i in range(13)]
_SIDES = [1 << i for i in range(8, 0, -1)]
_BUFFERS = [MB << i for i in range(7, 0, -1)]


@dataclass(frozen=True, kw_only=True)
class DesignColumns:
    """Designs as columns (n rows), in the order in which PHAZE generates them."""

    sizes: Int64  # (n, 6): tensor cores, width, depth, vector cores, lanes of each, bytes of the buffer
    area: Float64  # µm²

    def __len__(self) -> int:
        return len(self.area)

    def at(self, row: int, like: Accelerator) -> Accelerator:
        """Return one of them, with memory, links and clock of another."""
        return replace(like, **dict(zip(SIZES, self.sizes[row].tolist(), strict=True)))


def design_columns(area: float = 0.0) -> DesignColumns:
    """Return all designs of at most this area (µm²; by default of `TPU_LIKE`, which are the 29,360 published ones).

    Raises ForetraceError where there is none.
    """
    if not 0 <= area < inf:
        raise ForetraceError(f"`area=` must be a number of mm² from 0, got {area / 1e6:g}; leave it out for 279.")
    limit, terms = area or TPU_LIKE.area, area_terms()
    sizes = np.array(list(product(_POWERS[::-1], _POWERS[::-1], _SIDES, _SIDES, _BUFFERS)), dtype=np.int64)
    sizes = sizes[:, [0, 2, 3, 1, 2, 4]]  # lanes are as wide as the arrays

    def of(term: str, column: Int64) -> Float64:
        values, back = np.unique(column, return_inverse=True)
        return np.array([terms[term, each] for each in values.tolist()])[back]

    total = sizes[:, 0] * of("tensor_core", sizes[:, 1] * sizes[:, 2]) + sizes[:, 3] * of("vector_core", sizes[:, 4])
    total += of("global_buffer", sizes[:, 5])
    limit = min(limit, float(total.max()))
    one = (sizes[:, 0] == 1) | (sizes[:, 3] == 1)
    within = (total <= limit * (1 + 1e-11)) & (one | (total >= LEAST_SHARE * limit))
    if not within.any():
        raise ForetraceError(
            f"no accelerator has an area of at most {limit / 1e6:g} mm²; give {total.min() / 1e6:.3g} or more."
        )
    return DesignColumns(sizes=sizes[within], area=total[within])


@dataclass(frozen=True, kw_only=True)
class PricedDesigns:
    """Every design with its best plan."""

    seconds: Float64  # n
    chosen: Int64  # row of the plans
    joules: Float64


@dataclass(frozen=True, kw_only=True)
class CodesignSpace:
    """What there is to choose from. Raises ForetraceError where no plan is possible."""

    model: TransformerSizes
    devices: int
    batch: int
    training: bool
    like: Accelerator  # memory, links and clock
    designs: DesignColumns
    only: Parallelism | None = None  # the plan, where it is given
    decode: int = 0  # words in the cache behind which each sample has one more; 0: whole sequences

    @cached_property
    def arrays(self) -> tuple[Float64, Float64]:
        """Model and constants as `kernels` takes them."""
        model = replace(self.model, length=1) if self.decode else self.model
        return vector(model, DESIGNED), constant_vector(DESIGNED)

    @cached_property
    def plans(self) -> tuple[Int64, Float64]:
        """Plans that fit into the memory, the least recomputation of each split, and what `plan_facts` says of them."""
        s, c = self.arrays
        rows = np.array([fields_of(each) for each in self._splits()], dtype=np.int64).reshape(-1, len(plans_of.FIELDS))
        facts = np.zeros((len(rows), 3))
        on = on_design(self.like)
        kernels.plan_facts(s, on.array(), c, rows, self.batch, self.training, self.decode, facts)
        fit = facts[:, 0] <= on.capacity
        if not fit.any():
            what = f"cannot be split over {self.devices} devices; give another number of devices or another batch."
            if len(facts):
                what = (
                    f"needs {facts[:, 0].min() / 1e9:.3g} GB of each of {self.devices} devices at least, which have "
                    f"{self.like.hbm_gb:g} GB; give more devices or another batch."
                )
            raise ForetraceError(f"{self.model.name} with a batch of {self.batch} {what}")
        rows = rows[fit]
        kinds = [plans_of.TENSOR, plans_of.SEQUENCE, plans_of.PIPELINE, plans_of.DATA, plans_of.MICRO]
        _, first = np.unique(rows[:, kinds], axis=0, return_index=True)
        first.sort()
        return rows[first], facts[fit][first]

    def _splits(self) -> list[Parallelism]:
        s, n = self.arrays[0], self.devices
        if self.only:
            return [self.only]
        found = []
        for tensor in divisors(n):
            if not plans_of.fits(s, tensor, 1):
                continue
            cut = tensor > 1 and not self.decode and self.model.length % tensor == 0
            sequences = range(int(cut and not self.training), int(cut) + 1)
            for pipeline in divisors(n // tensor):
                data = n // (tensor * pipeline)
                if self.model.layers % pipeline or self.batch % data:
                    continue
                for micro in divisors(self.batch // data):
                    found += [Parallelism(tensor=tensor, sequence=sequence, pipeline=pipeline, data=data, micro=micro,
                                          recompute=each, zero=int(self.training and data > 1))
                              for sequence in sequences for each in range(3 if self.training else 1)]  # fmt: skip
        return found

    @cached_property
    def _columns(
        self,
    ) -> tuple[Int64, Float64, Int64, Int64, Float64, Float64, Float64, Float64, Int64, Int64, Float64]:
        """Operators of every tensor degree and micro-batch, and their costs by arrays and by buffer."""
        rows, sizes = self.plans[0], self.designs.sizes
        pairs, pair_of = np.unique(rows[:, [plans_of.TENSOR, plans_of.MICRO]], axis=0, return_inverse=True)
        table = np.zeros((len(pairs), kernels.ROWS, 7))
        for out, (tensor, micro) in zip(table, pairs.tolist(), strict=True):
            kernels.operator_rows(self.arrays[0], tensor, 0, micro, self.decode, out)
        every = table[:, :, designed.BATCH : designed.NUMBERS].reshape(-1, 4)
        products, product_of = np.unique(every, axis=0, return_inverse=True)
        arrays, arrays_of = np.unique(sizes[:, :3], axis=0, return_inverse=True)
        buffers, buffer_of = np.unique(sizes[:, 5], return_inverse=True)
        base = on_design(self.like).array()
        cores = np.tile(base, (len(arrays), 1))
        cores[:, [designed.CORES, designed.ROWS, designed.COLUMNS]] = arrays
        by_cores = np.zeros((len(arrays), len(products), 3))
        designed.product_columns(products, cores, by_cores)
        held = np.tile(base, (len(buffers), 1))
        held[:, designed.CORES], held[:, designed.BUFFER] = 1.0, buffers
        by_buffer = np.zeros((len(buffers), len(products), 3))
        designed.product_columns(products, held, by_buffer)
        lanes = (sizes[:, 3] * sizes[:, 4]).astype(np.float64)
        return (pair_of.ravel(), table, pairs[:, 0].copy(), product_of.reshape(table.shape[:2]),
                by_cores[..., 0].copy(), by_cores[..., 1].copy(), by_buffer[..., 2].copy(), buffers.astype(np.float64),
                arrays_of.ravel(), buffer_of.ravel(), lanes)  # fmt: skip

    def price(self, link_gb_s: float, only: Mask | None = None, lanes_rate: float = 1.0) -> PricedDesigns:
        """Return every design with its best plan, of `only` these plans; links of so many GB/s."""
        (rows, _), (s, c) = self.plans, self.arrays
        machine = on_design(replace(self.like, link_gb_s=link_gb_s)).array()
        facts = np.zeros((len(rows), 3))
        kernels.plan_facts(s, machine, c, rows, self.batch, self.training, self.decode, facts)
        pair_of, table, degrees, product_of, cycles, ports, memory, buffers, arrays_of, buffer_of, lanes = self._columns
        keep = np.ones(len(rows), dtype=np.bool_) if only is None else only
        n = len(self.designs)
        seconds, chosen, counts = np.zeros(n), np.zeros(n, dtype=np.int64), np.zeros((n, 4))
        kernels.price(
            s, machine, c, rows[keep], pair_of[keep], facts[keep], self.batch, self.training, table, degrees,
            product_of, cycles, ports, memory, buffers, arrays_of, buffer_of, lanes * lanes_rate, seconds, chosen,
            counts,
        )  # fmt: skip
        return PricedDesigns(seconds=seconds, chosen=np.flatnonzero(keep)[chosen], joules=counts @ np.array(PJ) * 1e-12)

    def plan(self, priced: PricedDesigns, row: int) -> Parallelism:
        """Return the plan of a design."""
        return configuration_of(self.plans[0][priced.chosen[row]])

    def expert(self) -> Parallelism:
        """Return the plan of the fewest devices for a replica, stages first, and the smallest micro-batch."""
        rows = self.plans[0]
        tensor, pipeline, micro = (rows[:, at] for at in (plans_of.TENSOR, plans_of.PIPELINE, plans_of.MICRO))
        return configuration_of(rows[np.lexsort((micro, tensor, tensor * pipeline))[0]])

    def one(
        self, design: Accelerator, only: Parallelism | None = None, *, lanes_rate: float = 1.0
    ) -> tuple[float, Parallelism]:
        """Return seconds of a design with its links, which need not be among the designs, and its best plan, or `only`
        this.

        `lanes_rate`: of its vector cores, over what is assumed.
        """
        sizes = np.array([[getattr(design, each) for each in SIZES]], dtype=np.int64)
        columns = DesignColumns(sizes=sizes, area=np.zeros(1))
        alone = replace(self, designs=columns, like=design, only=only)
        found = alone.price(design.link_gb_s, lanes_rate=lanes_rate)
        return float(found.seconds[0]), alone.plan(found, 0)


class DesignProblem(Problem[tuple[Any, ...]]):
    """The logarithm of an iteration's seconds; a point has a value for each of `CHOSEN`.

    All designs are priced at once, which is quicker than one by one; a call looks one of them up.
    """

    def __init__(self, space: CodesignSpace, link_gb_s: float) -> None:
        designs = space.designs.sizes[:, [SIZES.index(each) for each in CHOSEN]]
        self.space = Choices(tuple(tuple(sorted(set(column.tolist()))) for column in designs.T))
        seconds = space.price(link_gb_s).seconds.tolist()
        self._seconds = dict(zip(map(tuple, designs.tolist()), seconds, strict=True))

    @property
    def optimum(self) -> float:
        """The least cost."""
        return log(min(self._seconds.values()))

    def costs(self, points: Sequence[tuple[Any, ...]]) -> list[float]:
        found = (self._seconds.get(tuple(point)) for point in points)
        return [Infeasible("above the area, or far below it") if each is None else log(each) for each in found]
