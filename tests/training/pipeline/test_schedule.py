"""Tables of actions: closed forms, what is refused, and a plain reading of what a table does to weights."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.training.pipeline.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    B,
    F,
    I,
    PipelineSchedule,
    U,
    interleaved,
    one_f_one_b,
    parse,
    two_bw,
)


def works(schedule: PipelineSchedule) -> bool:
    """Play a table that nobody has checked: does every pass run on the weights and gradients that it should?"""
    home = {each.stage: r for r, row in enumerate(schedule.rows) for each in row if each.kind == F}
    stages, m = len(schedule.versions), schedule.micro_batches
    if set(home) != set(range(stages)):
        return False
    sets = {s: dict.fromkeys(range(v), -1) | {0: 0} for s, v in enumerate(schedule.versions)}
    made = dict.fromkeys(home, 0)
    arrived: set[tuple[ActionKind, int, int]] = set()
    kept: dict[tuple[int, int], int] = {}  # (stage, micro-batch): version of the forward pass
    half: set[tuple[int, int]] = set()
    added: dict[int, list[int]] = {s: [] for s in home}
    at = [0] * len(schedule.rows)

    def step(action: Action, row: int) -> bool | None:
        """None: it has to wait."""
        kind, i, s = action
        if kind == U:
            for mine in (s for s in home if home[s] == row):
                if i != made[mine] or sorted(added[mine]) != list(range(i * m, (i + 1) * m)):
                    return False
                sets[mine][(i + 1) % schedule.versions[mine]] = i + 1
                made[mine], added[mine] = i + 1, []
            return True
        if s not in home or home[s] != row:
            return False
        version = max(i // m - schedule.versions[s] + 1, 0)
        if sets[s][version % schedule.versions[s]] != version:
            return False
        if kind == F:
            if s and (F, i, s - 1) not in arrived:
                return None
            if (F, i, s) in arrived:
                return False
            kept[s, i] = version
        elif kind in (B, I):
            if s + 1 < stages and (B, i, s + 1) not in arrived:
                return None
            if (s, i) not in kept or (s, i) in half:
                return False
            half.add((s, i))
            if kind == B:
                added[s].append(i)
                del kept[s, i]
        else:
            if (s, i) not in half or (s, i) not in kept:
                return False
            added[s].append(i)
            del kept[s, i]
        if made[s] != i // m and kind != F:  # gradients of another batch are on these weights
            return False
        arrived.add((B if kind == I else kind, i, s))
        return True

    moved = True
    while moved:
        moved = False
        for r, row in enumerate(schedule.rows):
            while at[r] < len(row) and (fine := step(row[at[r]], r)) is not None:
                if not fine:
                    return False
                at[r], moved = at[r] + 1, True
    ended = all(at[r] == len(row) for r, row in enumerate(schedule.rows))
    batches = max(made.values())
    every = {(F, i, s) for i in range(batches * m) for s in home}
    return (
        ended
        and not kept
        and not any(added.values())
        and len(set(made.values())) == 1
        and every <= arrived
        and batches > 0
    )


def unchecked(like: PipelineSchedule, rows: list[list[Action]]) -> PipelineSchedule:
    made = object.__new__(PipelineSchedule)
    vars(made).update(vars(like) | {"rows": tuple(map(tuple, rows))})
    for cached in ("process_of", "stages_of", "last", "halves"):
        vars(made).pop(cached, None)
    return made


sizes = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 7), st.integers(1, 4))


def drawn(size: tuple[str, int, int, int], warmup: int = 1) -> PipelineSchedule:
    name, stages, m, batches = size
    options = {"warmup": warmup} if name in ("1f1b-flush", "1f1b", "2bw") else {}
    if name == "interleaved":
        options = {"chunks": 2}
        stages, m = 2 * stages, m * stages
    return SCHEDULES[name](stages, max(m, warmup * (stages - 1)) if name == "2bw" else m, batches, **options)


@given(sizes, st.integers(0, 3))
def test_published_schedules_work(size: tuple[str, int, int, int], warmup: int) -> None:
    schedule = drawn(size, warmup)
    assert works(schedule)
    assert parse(
        str(schedule), micro_batches=schedule.micro_batches, versions=schedule.versions, name=schedule.name
    ) == schedule  # fmt: skip
    schedule.run_order(clipped=True, tied=[(0, schedule.stages - 1)] if schedule.stages > 1 else [])


@given(sizes, st.randoms(use_true_random=False))
def test_a_changed_table_is_refused_unless_it_works(size: tuple[str, int, int, int], chance: random.Random) -> None:
    schedule = drawn(size)
    rows = [list(row) for row in schedule.rows]
    for _ in range(chance.randint(1, 2)):
        row = chance.choice(rows)
        a, b = chance.randrange(len(row)), chance.randrange(len(row))
        b = chance.choice((b, min(a + 1, len(row) - 1)))
        change: Callable[[], object] = chance.choice(
            (lambda: row.__setitem__(slice(None), _swapped(row, a, b)), lambda: row.insert(b, row.pop(a)))  # noqa: B023
            + ((lambda: row.pop(a),) if len(row) > 1 and chance.random() < 0.2 else ())  # noqa: B023
        )
        change()
    try:
        PipelineSchedule(
            name="changed",
            rows=tuple(map(tuple, rows)),
            micro_batches=schedule.micro_batches,
            versions=schedule.versions,
        )
        accepted = True
    except ForetraceError:
        accepted = False
    assert accepted == works(unchecked(schedule, rows))


def _swapped(row: list[Action], a: int, b: int) -> list[Action]:
    changed = list(row)
    changed[a], changed[b] = changed[b], changed[a]
    return changed


@given(st.integers(1, 6), st.integers(1, 12))
def test_micro_batches_in_flight(p: int, m: int) -> None:
    flush = SCHEDULES["1f1b-flush"](p, m, 2)
    assert [flush.in_flight(r) for r in range(p)] == [min(p - r, m) for r in range(p)]
    assert {SCHEDULES["gpipe"](p, m, 2).in_flight(r) for r in range(p)} == {m}
    zero = SCHEDULES["zero-bubble"](p, m, 2)
    assert max(zero.in_flight(r) for r in range(p)) == min(p, m)  # no more than 1F1B's first stage
    if m >= p - 1:
        assert [two_bw(p, m, 2).in_flight(r) for r in range(p)] == [min(p - r, 2 * m) for r in range(p)]
    if m >= 2 * (p - 1):
        assert max(two_bw(p, m, 2, warmup=2).in_flight(r) for r in range(p)) == min(2 * p - 1, 2 * m)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 3))
def test_the_fewest_micro_batches_of_2bw(p: int, m: int, warmup: int) -> None:
    least = max(warmup * (p - 1), 1)
    if m >= least:
        assert two_bw(p, m, 3, warmup=warmup).versions == (2,) * p
        return
    with pytest.raises(ForetraceError, match=f"needs {least} micro-batches"):
        two_bw(p, m, 3, warmup=warmup)
    # It is the fewest: the same order of passes with two versions works with no smaller number.
    assume(m >= 1)
    endless = one_f_one_b(p, m, 3, warmup=warmup)
    assert max(endless.versions) > 2
    with pytest.raises(ForetraceError, match=r"whose weights it runs on|which it needs"):
        PipelineSchedule(name="two", rows=endless.rows, micro_batches=m, versions=(2,) * p)


def test_pipedream_keeps_as_many_versions_as_stages_follow() -> None:
    assert one_f_one_b(4, 1, 3).versions == (4, 3, 2, 1)


def test_interleaved_runs_two_chunks_per_process() -> None:
    schedule = interleaved(4, 4, 1)
    assert schedule.process_of == {0: 0, 1: 1, 2: 0, 3: 1}
    with pytest.raises(ForetraceError, match=r"`micro_batches=4`"):
        interleaved(4, 3, 1)


@pytest.mark.parametrize(
    ("text", "versions", "says"),
    [
        ("F0 B0 U0\nB0 F0 U0", 1, r"row of process 1 B0@1 comes before F0@1"),
        ("F0 B0 U0 F1 B1 U1\nF0 F1 B0 U0 B1 U1", 1, r"F1@1 comes before U0, whose weights it runs on"),
        ("F0 F1 F2 B0 U0 B1 U1 B2 U2\nF0 B0 U0 F1 B1 U1 F2 B2 U2", 2, r"F2@0 comes before U0"),
        ("F0 B0 U0 F1 B1 U1\nF0 F1 B1 B0 U0 U1", 2, r"B1@1 comes before U0"),
        ("F0 B0 U0 F1 B1 U1\nF1 B1 U1 F0 B0 U0", 2, r"comes before U0"),
        ("F0 U0 B0", 1, r"U0 comes before B0@0"),
        ("F0 B0 B0 U0", 1, "twice"),
        ("F0 B0", 1, "batches are not whole"),
        ("F0 B0 U0 F1", 1, r"have 1 backward passes"),
        ("F0 I0 B0 W0 U0", 1, r"backward passes"),
        ("F0 B0@3 U0", 1, "of a stage that is not there"),
        ("F0 B0 U0\nF0 B0 U0 F1 B1 U1", 2, "row of process 0 batches are not whole"),
        ("F0 B0 U0\nF0 B0", 1, "every process must update once"),
        ("F0 X0 B0 U0", 1, "which is no action"),
        ("", 1, "stage"),
    ],
)
def test_what_cannot_run_is_refused_with_the_place(text: str, versions: int, says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        parse(text, micro_batches=1, versions=versions)


def test_a_deadlock_is_named() -> None:
    with pytest.raises(ForetraceError, match=r"wait for each other: process 0 waits at B0@0; process 1 waits at F1@1"):
        parse("F0 B0 F1 B1 U0\nF1 B1 F0 B0 U0", micro_batches=2)


def test_a_tied_weight_may_deadlock_where_none_does_not() -> None:
    """Each of two stages would wait for the gradients of the other before it sends its own."""
    schedule = parse("F0 F1 F2 B0 U0 B1 U1 B2 U2\nF0 B0 U0 F1 B1 U1 F2 B2 U2", micro_batches=1, versions=(3, 1))
    assert schedule.run_order(clipped=True) and schedule.run_order(tied=[(0, 1)])
    late = parse("F0 F1 B0 B1 U0\nF0 B0 F1 B1 U0", micro_batches=2)
    assert late.run_order(tied=[(0, 1)])
    with pytest.raises(ForetraceError, match="wait for each other"):
        late.run_order(tied=[(0, 1), (1, 0)])
