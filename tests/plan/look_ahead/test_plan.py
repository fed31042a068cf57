"""Steps over an embedding server, against sums by hand and what trainers really send."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.rows.run import RowWeights
from foretrace.plan.look_ahead.plan import (
    NUMBER,
    CacheQuestion,
    Conditions,
    cached_s,
    plan_cache,
    traffic,
    uncached_s,
)
from foretrace.plan.look_ahead.trial import CacheTrial, RunArm, repeated
from foretrace.report import jsonout
from foretrace.report import plan_rows as report
from foretrace.report.blocks import Grid
from foretrace.training.rows.lookahead import plan_ahead
from foretrace.training.rows.lookups import EmbeddingTable, Lookups, zipf


def lookups(batches: int = 20, samples: int = 16) -> Lookups:
    return zipf(exponent=1.1, tables=3, rows=200, pooling=2, samples=samples, batches=batches)


def question(**given: object) -> CacheQuestion:
    common: dict[str, object] = {"source": "zipf", "lookups": lookups(), "trainers": 2, "link": "50mbit"}
    return CacheQuestion(**{"look_ahead": 4} | common | given)  # type: ignore[arg-type]


SIZES = {"row": 8 * NUMBER, "gradient": 8 * NUMBER, "dense": 100 * NUMBER}
NOTHING = (0.0, 0.0, 0.0)
ON = Conditions(bytes_per_s=(1e6,) * 3, host_s={False: NOTHING, True: NOTHING}, compute_s=(0.01,) * 3)


def test_an_uncached_step_is_fetch_passes_and_push() -> None:
    table = EmbeddingTable(name="t", rows=10, ids=np.array([0, 1, 2, 3] * 4), offsets=np.arange(17))
    plan = plan_ahead(Lookups(tables=(table,), samples=4), trainers=2, look_ahead=1)
    moved = traffic(plan, **SIZES, cached=False)
    dense = NUMBER * 100 / 2
    fetch, push = 2 * NUMBER + 2 * 8 * NUMBER, 2 * NUMBER + 2 * 8 * NUMBER + dense
    expected = 0.01 + (fetch + push + dense) / 1e6
    np.testing.assert_allclose(uncached_s(moved, ON), expected)
    # Each trainer reads its own two rows in every batch: nothing but the dense gradients is exchanged.
    kept = traffic(plan, **SIZES, cached=True)
    assert kept.later.sum() == kept.back[:, :-1].sum() == kept.fetch[:, 1:].sum() == 0
    np.testing.assert_allclose(cached_s(kept, ON, ahead=1)[2:], 0.01 + 2 * dense / 1e6)


def test_bytes_are_those_that_trainers_send() -> None:
    torch = pytest.importorskip("torch")
    from foretrace.training.rows.optimizers import row_optimizer
    from foretrace.training.rows.rows import RowsInMemory
    from foretrace.training.rows.server import Peers, RowServer
    from foretrace.training.rows.trainer import RowTrainer
    from foretrace.zoo.recommendation import RowClicks

    torch.set_num_threads(1)
    trainers, rule, found = 3, row_optimizer("adagrad"), lookups()
    peers = [Peers(rank, trainers) for rank in range(trainers)]
    jobs = [RowClicks(tables=3, width=8, samples=16) for _ in range(trainers)]
    rows = RowsInMemory(np.full((600, 9), 0.1, np.float32))

    def one(rank: int) -> RowTrainer:
        peers[rank].meet([each.address for each in peers], server.token)
        job = jobs[rank]
        trainer = RowTrainer(job.module, job.loss, found, rule, peers[rank], server.address, server.token)
        trainer.ahead(0, found.batches, 4)
        trainer.close()
        return trainer

    with RowServer(rows, trainers=trainers, optimizer=rule) as server, ThreadPoolExecutor(trainers) as pool:
        done = list(pool.map(one, range(trainers)))
    sizes = {"row": 9 * NUMBER, "gradient": 8 * NUMBER, "dense": len(done[0].dense) * NUMBER}
    moved = traffic(plan_ahead(found, trainers=trainers, look_ahead=4), **sizes, cached=True)
    for rank, trainer in enumerate(done):
        sent = (moved.gradients + moved.values + moved.later)[0, :, rank].sum()
        assert peers[rank].bytes_sent == pytest.approx(sent, abs=4 * 2 * trainers * found.batches)  # uneven shares
        assert sum(each.counters.bytes_read for each in trainer.fetches) == moved.fetch[1, :, rank].sum()
        written = moved.back[0, :, rank].sum()
        assert trainer.pushes.counters.bytes_written == written * 9 / 10  # and a number per row
        peers[rank].close()


def test_a_step_is_no_shorter_than_its_bound_and_ranges_hold_their_values() -> None:
    plan = plan_cache(question())
    assert plan.chosen.bound_s <= plan.chosen.step.high_s
    for step in (plan.uncached, plan.chosen.step, *(each.step for each in plan.others)):
        assert step.low_s <= step.step_s <= step.high_s
    assert plan.chosen.speedup.low <= plan.chosen.speedup.value <= plan.chosen.speedup.high
    known = plan_cache(question(compute_s=0.04))
    assert known.uncached.high_s - known.uncached.low_s < plan.uncached.high_s - plan.uncached.low_s
    assert "assumed" in plan.notes[0] and not known.notes


def test_what_was_measured_narrows_the_range() -> None:
    rate = (6e6, 5.9e6, 6.1e6)
    measured = Conditions(bytes_per_s=rate, host_s={False: (0.01,) * 3, True: (0.002,) * 3}, compute_s=(0.04,) * 3)
    one, other = plan_cache(question(compute_s=0.04), measured), plan_cache(question(compute_s=0.04))
    assert one.uncached.high_s / one.uncached.low_s < other.uncached.high_s / other.uncached.low_s


def test_an_endless_link_leaves_passes_alone() -> None:
    moved = traffic(plan_ahead(lookups(), trainers=2, look_ahead=4), **SIZES, cached=True)
    fast = replace(ON, bytes_per_s=(1e15,) * 3)
    np.testing.assert_allclose(cached_s(moved, fast, ahead=4), 0.01)
    assert plan_cache(question(), fast).chosen.bound_s == pytest.approx(0.01)


def test_a_repeated_trace_reads_the_same_again() -> None:
    found = repeated(lookups(), 5, 3)
    assert found.batches == 15
    for batch in range(5):
        for one, other in zip(found.read(batch), found.read(batch + 10), strict=True):
            np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize(
    "wrong",
    [{"trainers": 17}, {"look_ahead": 0}, {"link": "slow"}, {"optimizer": "adam"}, {"width": 0}, {"compute_s": -1.0}],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ForetraceError):
        plan_cache(question(**wrong))
    with pytest.raises(ForetraceError, match="4 batches"):
        plan_cache(question(lookups=lookups(3)))


def test_the_answer_is_its_schema() -> None:
    answer, narrow = (report.planned_cache(plan_cache(question(width=width))) for width in (64, 32))
    assert jsonout.loads(jsonout.dumps(answer), "plan cache") == answer
    assert answer.chosen.held_bytes == answer.chosen.held_rows * 4 * 64
    assert answer.uncached_bytes > 1.8 * narrow.uncached_bytes and answer.next.count("--width 64") == 1
    assert list(answer.shown(6))


def test_residuals_are_shown_as_shares() -> None:
    plan = plan_cache(question())
    arms = [
        RunArm(name=name, predicted=plan.uncached, steps_s=(0.1,), measured_s=0.1, residual=off)
        for name, off in (("uncached", 0.021), ("look-ahead", -0.0795))
    ]
    trial = CacheTrial(
        arms=(arms[0], arms[1]), speedup=plan.chosen.speedup, hit_rate=0.3, mbit_s=48.0,
        weights=RowWeights(table="0", dense="1"),
    )  # fmt: skip
    grids = [each for each in report.planned_cache(plan, trial).shown(6) if isinstance(each, Grid)]
    assert [row[-1] for row in grids[-1].rows] == ["+2.1 %", "-8.0 %"]


def test_loaders_are_recorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from foretrace.plan.look_ahead.plan import trace

    found = trace("recorded:ncf batches=4")
    assert [len(table.ids) for table in found.tables] == [len(found.tables[0].offsets) - 1] * 4 and found.batches == 4
    for wrong in ("recorded:resnet50", "recorded:ncf batches=x", "recorded:nothing", "reuse:"):
        with pytest.raises(ForetraceError):
            trace(wrong)
