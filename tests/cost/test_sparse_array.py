"""The array that skips zeros: closed counts without zeros, a twin that multiplies one by one, and bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.cost.accelerators.sparse import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    ArrayRun,
    MaskedConv,
    SparseArray,
    drawn,
    expected,
    simulate,
)
from foretrace.errors import ForetraceError

SMALL = SparseArray(pes=3, lanes=2, barrier=2, bandwidth=1e8)


def conv(
    *, images: int = 2, channels: int = 4, outputs: int = 6, side: int = 5, kernel: int = 3, stride: int = 1,
    padding: int = 1, dilation: int = 1, groups: int = 1, zeros: tuple[float, float] = (0.0, 0.0), seed: int = 0,
) -> MaskedConv:  # fmt: skip
    after = (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    made = MaskedConv(
        name="c", weight=(outputs, channels // groups, kernel, kernel), stride=(stride,) * 2, padding=(padding,) * 2,
        dilation=(dilation,) * 2, groups=groups, inputs=np.ones((images, channels, side, side), np.bool_),
        gradients=np.ones((images, outputs, after, after), np.bool_),
    )  # fmt: skip
    return drawn(made, *zeros, seed=seed)


def computing(run: ArrayRun) -> float:
    """Speed-up of the PEs alone."""
    return run.sum("compute", dense=True) / run.sum("compute")


Case = tuple[tuple[int, ...], tuple[int, ...], bool]


def cases(n: int, k: int, channel: int, c: int, at: tuple[int, ...], a: bool, d: bool) -> dict[str, Case]:
    """Per pass: the output that a product belongs to, what shares lanes with it, and whether it is not 0."""
    y, x, oy, ox, ty, tx = at
    return {
        FORWARD: ((n, oy, ox, k), (ty, tx), a),
        INPUT_GRADIENT: ((n, y, x, channel), (ty, tx), d),
        WEIGHT_GRADIENT: ((ty, tx, c, k), (n,), a and d),
    }


def twin(conv: MaskedConv, what: str, array: SparseArray) -> tuple[int, int]:
    """(cycles, multiplications) of a pass, one multiplication at a time."""
    images, channels, *side = conv.inputs.shape
    outputs, of_group, *kernel = conv.weight
    per_group, after = outputs // conv.groups, conv.gradients.shape[2:]
    sums: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}  # per output, non-zeros that may share lanes
    for n, k, c in product(range(images), range(outputs), range(of_group)):
        group = k // per_group
        channel = group * of_group + c
        for oy, ox, ty, tx in product(*map(range, (*after, *kernel))):
            y, x = (
                o * s + t * d - p
                for o, s, t, d, p in zip((oy, ox), conv.stride, (ty, tx), conv.dilation, conv.padding, strict=True)
            )
            if not (0 <= y < side[0] and 0 <= x < side[1]):
                continue
            a, d = bool(conv.inputs[n, channel, y, x]), bool(conv.gradients[n, k, oy, ox])
            output, chunk, used = cases(n, k, channel, c, (y, x, oy, ox, ty, tx), a, d)[what]
            chunk = chunk if array.packing == "tap" else ()
            found = sums.setdefault(output, {})
            found[chunk] = found.get(chunk, 0) + used
    if what == INPUT_GRADIENT:  # pixels that no tap reaches have an output without work
        for n, y, x, channel in product(range(images), range(side[0]), range(side[1]), range(channels)):
            sums.setdefault((n, y, x, channel), {})
    order = sorted(sums)
    if array.order == "pixels":
        order = sorted(
            sums, key=lambda o: (o[3], o[2], o[0], o[1]) if what == WEIGHT_GRADIENT else (o[0], o[3], o[1], o[2])
        )
    masked = what == INPUT_GRADIENT and conv.maskable
    keep = {o: not masked or bool(conv.inputs[o[0], o[3], o[1], o[2]]) for o in order}
    work = {o: sum(ceil(each / array.lanes) for each in sums[o].values()) if keep[o] else 0 for o in order}
    multiplications = sum(sum(sums[o].values()) for o in order if keep[o])
    if array.dispatch == "redistributed":
        return ceil(sum(work.values()) / array.pes), multiplications
    given = [o for o in order if keep[o]] if array.dispatch == "unmasked" else order
    cycles, room = 0, array.pes * array.barrier
    for at in range(0, len(given), room):
        load = [0] * array.pes
        for i, output in enumerate(given[at : at + room]):
            load[i // array.barrier if array.order == "blocked" else i % array.pes] += work[output]
        cycles += max(load)
    return cycles, multiplications


@given(
    st.sampled_from(["channels", "pixels", "blocked"]), st.sampled_from(["tap", "sum"]),
    st.sampled_from(["unmasked", "fixed", "redistributed"]), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2),
    st.sampled_from([(1, 0), (3, 1), (3, 0)]), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_cycles_are_those_of_the_twin(
    order: str, packing: str, dispatch: str, lanes: int, stride: int, dilation: int, kernel: tuple[int, int],
    groups: int, maskable: bool, seed: int,
) -> None:  # fmt: skip
    array = replace(SMALL, order=order, packing=packing, dispatch=dispatch, lanes=lanes)
    made = conv(
        channels=4, outputs=4, kernel=kernel[0], padding=kernel[1], stride=stride, dilation=dilation, groups=groups,
        zeros=(0.4, 0.6), seed=seed,
    )  # fmt: skip
    made = replace(made, maskable=maskable)
    run = simulate([made], array)
    for each in run.passes:
        assert (each.sparse.compute, each.sparse.multiplications) == twin(made, each.what, array)
        assert computing(run.of(each.what)) <= run.of(each.what).bound * (1 + 1e-12)


def test_without_zeros_the_count_is_closed() -> None:
    made = conv(images=2, channels=8, outputs=12, side=6, kernel=3, padding=0)
    found = {each.what: each for each in simulate([made], replace(SMALL, pes=4, lanes=3)).passes}
    per_output, outputs = 9 * ceil(8 / 3), 2 * 12 * 16
    assert found[FORWARD].dense.compute == found[FORWARD].sparse.compute == per_output * outputs / 4
    # A weight sums 16 pixels of each of two images; there are 12 × 8 × 9 weights.
    assert found[WEIGHT_GRADIENT].dense.compute == 2 * ceil(16 / 3) * 12 * 8 * 9 / 4
    assert all(each.dense.multiplications == 2 * 16 * 12 * 8 * 9 for each in found.values())


def test_fixed_places_lose_masked_outputs_and_dispatching_recovers_them() -> None:
    made = conv(images=1, channels=16, outputs=16, side=16, zeros=(0.5, 0.0))
    array = SparseArray(pes=16, lanes=4, barrier=1, bandwidth=1e8)
    gains = {
        name: computing(simulate([made], replace(array, dispatch=name, barrier=barrier)).of(INPUT_GRADIENT))
        for name, barrier in (("fixed", 1), ("unmasked", 16), ("redistributed", 1))
    }
    assert gains["fixed"] == pytest.approx(1.0, abs=0.01)
    assert gains["redistributed"] == pytest.approx(2.0, abs=0.1)
    assert gains["redistributed"] >= gains["unmasked"] > 1.7


@pytest.mark.parametrize("lanes", [1, 8, 16])
def test_wider_lanes_gain_less_and_weight_gradients_skip_both_operands(lanes: int) -> None:
    made = conv(images=1, channels=32, outputs=32, side=8, zeros=(0.5, 0.7))
    array = SparseArray(pes=8, lanes=lanes, dispatch="redistributed", bandwidth=1e8)
    found, wider = (simulate([made], each).of(*BACKWARD) for each in (array, replace(array, lanes=2 * lanes)))
    assert computing(found) >= computing(wider) * 0.999
    weight = simulate([made], array).of(WEIGHT_GRADIENT)
    left = weight.sum("multiplications") / weight.sum("multiplications", dense=True)
    assert left == pytest.approx(0.5 * 0.3, rel=0.1)


def test_memory_and_bitmaps_bound_what_is_gained() -> None:
    made = conv(images=1, channels=16, outputs=16, side=16, kernel=1, padding=0, zeros=(0.5, 0.5))
    free, tight = (simulate([made], SparseArray(bandwidth=each)).of(FORWARD) for each in (1e8, 1.0))
    assert free.speedup == computing(free)
    ones, pixels = 2 * int(made.inputs.sum()), 256 * 16
    assert tight.sum("nbytes") == ones + pixels / 8 + 2 * (pixels + 256)
    assert tight.sum("cycles") == tight.sum("nbytes") and tight.speedup < 1.5
    assert simulate([made], SparseArray(bandwidth=1.0, bitmaps="no")).of(FORWARD).speedup == 1.0
    assert free.energy_ratio < 1.0


def test_energy_is_counted_by_operations() -> None:
    made, array = conv(images=1, kernel=1, padding=0), SparseArray(bitmaps="no")
    found = simulate([made], array).passes[0]
    products, nbytes = 25 * 4 * 6, 2 * (25 * 4 + 25 * 6 + 24)
    assert found.dense.energy_j == pytest.approx(1e-12 * (products * (1.5 + 4 * 2.5) + nbytes * 160))
    assert found.sparse.energy_j - found.dense.energy_j == pytest.approx(1e-12 * products / 8 * 2.5)


def test_what_is_drawn_on_a_part_stands_for_the_whole() -> None:
    made, array = conv(images=2, channels=48, outputs=48, side=40), SparseArray()
    full = simulate([drawn(made, 0.5, 0.7, seed=3)], array)
    for each in expected(made, 0.5, 0.7, array):
        whole = full.of(each.what)
        assert each.sparse.cycles / each.dense.cycles == pytest.approx(1 / whole.speedup, rel=0.06)
        assert each.sparse.nbytes == pytest.approx(whole.sum("nbytes"), rel=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("buffer_kib=1", "buffer_kib must hold one tile, which is 16 KiB"),
        ("lanes=0", "lanes must be above 0"),
        ("lanes=x", "lanes= must be a whole number"),
        ("dispatch=all", "dispatch must be one of unmasked, fixed, redistributed"),
        ("bitmaps=1", "bitmaps must be one of yes, no"),
        ("lane=3", "did you mean lanes=?"),
    ],
)
def test_mistakes_are_told_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ForetraceError, match="array") as error:
        SparseArray.of(text)
    assert said in str(error.value)


def test_an_array_is_written_as_it_is_read() -> None:
    array = SparseArray(lanes=8, dispatch="fixed", bitmaps="no")
    assert str(array) == "lanes=8 dispatch=fixed bitmaps=no"
    assert SparseArray.of(str(array)) == array
