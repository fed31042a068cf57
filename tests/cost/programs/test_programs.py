"""Tensor programs: listings and caches against counts made by hand, the predictor against known laws."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.programs import listing, misses, predictor, rank
from foretrace.cost.programs.compile import CompiledProgram
from foretrace.cost.programs.predictor import boost
from foretrace.cost.programs.program import Access, Buffer, Loop, LoopKind, Purpose, Statement, TensorProgram
from foretrace.cost.programs.schedules import Group, LoopSchedule, StagePlan, apply
from foretrace.cost.programs.tasks import KINDS, SIZES, task
from foretrace.errors import ForetraceError
from foretrace.hardware.processor import Caches

DOT = task("matmul", m=4, n=8, k=6)


def plain(order: str, *, vectorised: bool = False) -> TensorProgram:
    """A product with whole loops in this order."""
    plan = StagePlan(
        splits=(("i", (4,)), ("j", (8,)), ("k", (6,))), order=tuple((axis, 0) for axis in order), vectorised=vectorised
    )
    return apply(DOT, LoopSchedule(groups=(Group(shared=(), plans=(plan,)),)))


def copy(extents: tuple[int, int], strides: tuple[int, int], elements: int) -> TensorProgram:
    """y[...] = x[...] over two loops."""
    buffers = tuple(Buffer(name=n, shape=(elements,), role=r) for n, r in (("x", Purpose.INPUT), ("y", Purpose.OUTPUT)))
    moves = tuple(zip("ij", strides, strict=True))
    read, write = (Access(buffer=name, strides=moves) for name in "xy")
    leaf = Statement(name="y", target=write, reads=(read,), value=("read", 0))
    inner = Loop(variable="j", extent=extents[1], kind=LoopKind.SERIAL, body=(leaf,))
    return TensorProgram(
        task="copy", dtype="float32", buffers=buffers,
        nests=(Loop(variable="i", extent=extents[0], kind=LoopKind.SERIAL, body=(inner,)),),
    )  # fmt: skip


# --- machine code ----------------------------------------------------------------------------------------------------

CHAIN = """nest0:
# %bb.0:                                # %start
\txorl\t%eax, %eax
.LBB0_1:                                # %h1
                                        # =>This Inner Loop Header: Depth=1
\tvfmadd231ps\t(%rdi,%rax,4), %ymm1, %ymm0
\taddq\t$8, %rax
\tcmpq\t$800, %rax
\tjb\t.LBB0_1
# %bb.2:                                # %x1
\tretq
"""


def test_a_chain_of_dependent_sums_costs_its_latency() -> None:
    found = listing.read(CHAIN, [{1: (1, 100)}])
    assert found.counts["multiply"] == found.counts["load"] == 100
    assert found.counts["instructions"] == 100 * 4 + 2
    assert found.cycles["long_chain"] == pytest.approx(100 * (4 - 1)), "4 cycles each, one of which issue takes"
    assert found.cycles["exits"] == 1
    apart = CHAIN.replace("%ymm1, %ymm0", "%ymm1, %ymm0\n\tvxorps\t%xmm0, %xmm0, %xmm0")
    assert listing.read(apart, [{1: (1, 100)}]).cycles["long_chain"] < 50, "what is cleared waits for nothing"


def test_sums_kept_in_memory_wait_for_their_store() -> None:
    text = CHAIN.replace(
        "\tvfmadd231ps\t(%rdi,%rax,4), %ymm1, %ymm0\n",
        "\tvmovss\t(%rdx), %xmm0\n\tvaddss\t(%rdi,%rax,4), %xmm0, %xmm0\n\tvmovss\t%xmm0, (%rdx)\n",
    )
    found = listing.read(text, [{1: (1, 100)}])
    assert found.counts["store"] == 100 and found.counts["load"] == 200
    assert found.cycles["long_chain"] > 800


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="listings of x86-64 are read")
def test_blocks_run_as_often_as_the_program_says() -> None:
    for order in ("ijk", "ikj", "kji"):
        compiled = CompiledProgram(plain(order), "baseline")
        found = listing.read(compiled.listing, compiled.trips)
        assert found.counts["multiply"] == 4 * 8 * 6
    compiled = CompiledProgram(plain("ikj", vectorised=True), "baseline")
    found = listing.read(compiled.listing, compiled.trips)
    assert found.counts["multiply"] * 4 == 4 * 8 * 6, "four lanes in 128 bits"


# --- caches ----------------------------------------------------------------------------------------------------------


def test_what_fits_is_missed_once_and_what_does_not_every_time() -> None:
    small = misses.simulate(copy((4, 1024), (0, 1), 1024), Caches())
    assert sum(small.values()) == 0, "8 KiB stay"
    lines = 2 * 65536 * 4 // 64
    large = misses.simulate(copy((2, 65536), (0, 1), 65536), Caches(second=(64, 8)))
    assert large["l1_next"] + large["l1_other"] == pytest.approx(2 * lines, rel=0.01)
    assert large["l1_next"] > 0.95 * 2 * lines, "line after line"
    assert large["l2_next"] + large["l2_other"] == pytest.approx(2 * lines, rel=0.01)


def test_strides_of_a_page_fight_for_one_set_and_miss_pages() -> None:
    found = misses.simulate(copy((4, 256), (0, 1024), 256 * 1024), Caches())
    assert found["l1_other"] == 2 * 4 * 256, "one line of every page, all in one set of eight"
    assert found["pages"] == found["streams"] == 2 * 4 * 256
    for pages, followed in ((8, True), (9, False)):
        found = misses.simulate(copy((4, pages), (0, 1024), pages * 1024), Caches())
        assert found["pages"] == 0 and (found["streams"] == 0) is followed, "sixteen pages of both buffers"


def test_what_is_left_out_is_scaled() -> None:
    whole = 2 * 4_000_000 * 4 // 64
    found = misses.simulate(copy((4000, 1000), (1000, 1), 4_000_000), Caches())
    assert found["l1_next"] + found["l1_other"] == pytest.approx(whole, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 64), st.integers(0, 20))
def test_larger_caches_miss_no_more(rows: int, columns: int, stride: int) -> None:
    program = copy((rows, columns), (64, stride), 64 * rows + stride * columns + 1)
    small, large = (misses.simulate(program, Caches(first=(1, ways))) for ways in (2, 8))
    assert small["l1_next"] + small["l1_other"] >= large["l1_next"] + large["l1_other"]


# --- predictor -------------------------------------------------------------------------------------------------------


def drawn(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(8, 1.5, (count, len(predictor.ROW))))


def test_the_formula_finds_its_own_constants() -> None:
    rows = drawn(300)
    true = predictor.Formula(constants=(1.1, 0.6, 0.3, 0.5, 20.0, 1.0, 3.0, 5.0, 6.0, 9.0, 2.0, 3.0))
    found = predictor.fit_formula(rows, true.seconds(rows))
    assert np.abs(found.seconds(rows) / true.seconds(rows) - 1).max() < 0.15
    assert found.terms(rows).sum(axis=1) == pytest.approx(true.terms(rows).sum(axis=1), rel=0.3)


def test_few_programs_do_not_lead_far_from_a_usual_processor() -> None:
    rows, usual = drawn(4), predictor.Formula(constants=predictor.USUAL)
    found = predictor.fit_formula(rows, 2 * usual.seconds(rows))
    assert found.seconds(rows) == pytest.approx(2 * usual.seconds(rows), rel=0.05)
    assert usual.constants[-1] / found.constants[-1] == pytest.approx(2, rel=0.3), "the clock is what is free"


def test_trees_learn_what_the_formula_leaves() -> None:
    rows = drawn(200)
    formula = predictor.Formula(constants=predictor.USUAL)
    seconds = formula.seconds(rows) * np.where(rows[:, 0] > np.median(rows[:, 0]), 1.6, 0.8)
    found = predictor.fit(rows, seconds, np.arange(200) // 4)
    assert np.median(np.abs(found.predict(rows) / seconds - 1)) < 0.1
    assert 0.5 < found.low <= 1.1 and 0.9 <= found.high < 2
    kept = rank.unpacked(rank.packed(found))
    assert kept.predict(rows) == pytest.approx(found.predict(rows), rel=1e-3) and kept.about == found.about


def test_trees_reach_a_step() -> None:
    x = np.linspace(0, 1, 200)[:, None]
    y = np.where(x[:, 0] > 0.5, 1.0, -1.0)
    assert np.abs(boost(x, y, trees=200).predict(x) - y).mean() < 0.05


def test_what_binds_is_the_largest_term() -> None:
    rows = np.ones((2, len(predictor.ROW)))
    rows[0, predictor.ROW.index("pages")] = rows[1, predictor.ROW.index("long_chain")] = 1e6
    found = predictor.ProgramPredictor(formula=predictor.Formula(constants=predictor.USUAL), trees=None, low=1, high=1)
    assert found.binds(rows) == ["pages", "dependency chain"]


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_every_kind_has_sizes() -> None:
    assert set(SIZES) == set(KINDS)
    for kind, sizes in SIZES.items():
        task(kind, **{name: values[0] for name, values in sizes.items()}).define()


def test_schedules_are_ranked_and_the_best_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path))
    found = rank.rank(DOT, tries=6, measured=2)
    timed = [each for each in found.candidates if each.measured_s is not None]
    assert len(timed) == 2 and found.candidates[:2] == tuple(timed)
    assert all(each.low_s < each.predicted_s < each.high_s for each in found.candidates)
    assert rank.rank(DOT, tries=6, measured=0).candidates == rank.rank(DOT, tries=6, measured=0).candidates
    with pytest.raises(ForetraceError, match="at most 268 MB"):
        rank.rank(task("matmul", m=16384, n=16384, k=64), tries=1, measured=0)


def test_loops_are_said_in_a_word() -> None:
    assert rank.described(plain("ikj", vectorised=True)) == "i4 (j8v; k6 j8v)"


@pytest.mark.slow
def test_calibration_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(rank, "_TURNS", 6)
    found = rank.calibrate(1.0)
    kept, foreign = rank.load()
    assert not foreign and kept.about == found.about and "timed here" in kept.about
