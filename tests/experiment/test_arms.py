"""How arms take turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.experiment.arms import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    ROUNDS_OF_SHORT_STEPS,
    SHORT_STEP_S,
    Running,
    TurnPlan,
    plan,
    take_turns,
    waits,
    workers,
)

torch = pytest.importorskip("torch")


@given(step_s=st.floats(1e-4, 20.0), ratio=st.floats(0.3, 3.0), seconds=st.floats(0.5, 120.0))
def test_plans_keep_to_the_time_or_to_the_least(step_s: float, ratio: float, seconds: float) -> None:
    times = {"before": step_s, "after": ratio * step_s, "again": step_s}
    made = plan(times, seconds)
    assert made.discarded == 1
    assert LEAST_ROUNDS <= made.rounds <= MOST_ROUNDS
    assert made.steps >= 1
    takes = made.rounds * (made.discarded + made.steps) * sum(times.values())
    least = ROUNDS_OF_SHORT_STEPS if max(times.values()) < SHORT_STEP_S else LEAST_ROUNDS
    assert takes <= seconds * 1.0001 or made.rounds == least


def test_plans_by_hand() -> None:
    same = {"before": 0.1, "after": 0.1, "again": 0.1}
    assert plan(same, 20.0) == TurnPlan(discarded=1, steps=3, rounds=16, seconds=20.0)
    assert plan(same, 20.0, workers=2).discarded == 5  # what two workers have fetched ahead
    assert plan(same, 20.0, workers=1, epoch=8).steps == 5  # a block does not reach into the next epoch
    assert plan(dict.fromkeys(same, 0.004), 20.0).steps == 25
    assert plan(dict.fromkeys(same, 2.0), 20.0).steps == 1
    assert plan(dict.fromkeys(same, 2.0), 20.0, period=4).steps == 4  # what steps differ in is in every block


def running(model: Any, *, num_workers: int = 0) -> Running:
    from torch.utils.data import DataLoader, TensorDataset

    from foretrace.training.training import Training

    data = TensorDataset(torch.randn(64, 8))
    training = Training(
        name="tiny",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),
        loader=DataLoader(data, batch_size=16, shuffle=True, num_workers=num_workers),
        loss=lambda module, batch: module(batch[0]).square().mean(),
    )
    return Running(training=training, fresh=workers(training) > 0)


def test_arms_take_turns_and_keep_their_blocks() -> None:
    torch.manual_seed(0)
    first = running(torch.nn.Linear(8, 8))
    arms = {"before": first, "after": Running(training=first.training.copied(), fresh=False)}
    told: list[float] = []
    rounds = take_turns(
        arms, TurnPlan(discarded=1, steps=2, rounds=9, seconds=60.0), one_thread=False, tell=told.append
    )
    assert rounds.kept == tuple(range(9))
    assert (rounds.repeated, rounds.disturbed) == (0, 0)
    assert all(len(arm.wall_s) == len(arm.cpu_s) == 9 and min(arm.wall_s) > 0 for arm in arms.values())
    assert told[-1] == 1.0
    assert told == sorted(told)


@pytest.mark.parametrize("seconds", [0.5, 9.0, 10.4, 20.0])
def test_turns_keep_their_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    now, real = [0.0], Running.block

    def block(self: Running, plan: TurnPlan) -> None:
        real(self, plan)
        now[0] += 0.5

    monkeypatch.setattr(Running, "block", block)
    arms = {"before": running(torch.nn.Linear(8, 8)), "after": running(torch.nn.Linear(8, 8))}
    wanted = TurnPlan(discarded=1, steps=1, rounds=24, seconds=seconds)
    rounds = take_turns(arms, wanted, one_thread=False, clock=lambda: now[0])
    assert len(rounds.kept) >= LEAST_ROUNDS
    assert now[0] <= max(seconds, LEAST_ROUNDS * 1.0)  # a round takes a second
    assert now[0] >= min(seconds - 1.0, 24.0)


def test_the_same_seed_gives_both_arms_the_same_losses() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    one = running(model)
    other = Running(training=one.training.copied(), fresh=False)
    assert one.losses(5, seed=3) == other.losses(5, seed=3)


def test_what_can_wait() -> None:
    assert not waits(running(torch.nn.Linear(8, 8)).training)
    loaded = running(torch.nn.Linear(8, 8), num_workers=1)
    assert waits(loaded.training)
    assert loaded.fresh
    assert not waits(loaded.training.with_batches(2))
