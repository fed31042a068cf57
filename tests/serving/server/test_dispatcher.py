"""The dispatcher: every request has one outcome, whatever dies, is cancelled or reconfigured meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client")

from foretrace.errors import ForetraceError
from foretrace.serving.server.dispatcher import Dispatcher
from foretrace.serving.server.protocol import RequestError
from foretrace.serving.server.split import CoreSplit
from tests.serving.server.virtual import DEADLY, FACTS, POISON, WRONG, Machine, play

SPLITS = [CoreSplit.parse(text) for text in ("1x2:8", "2x1:4", "1x1:1", "1x2:2", "1x1:6+1x1:2")]


def counted(dispatcher: Dispatcher, what: str) -> float | None:
    return dispatcher.metrics.registry.get_sample_value(f"foretrace_{what}_total")


@asynccontextmanager
async def serving(machine: Machine, split: str = "2x1:4", queue: int = 1024) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(machine, cores=(0, 1), queue=queue)
    await dispatcher.reconfigure(CoreSplit.parse(split))
    try:
        yield dispatcher
    finally:
        await dispatcher.close(60.0)
        assert all(each.over for each in machine.all)
        assert (dispatcher.waiting, dispatcher.running) == (0, 0)


async def squares(dispatcher: Dispatcher, *numbers: int, deadline_s: float = 60.0) -> list[int]:
    found = await dispatcher.infer({"x": np.array(numbers)}, deadline_s)
    return [int(each) for each in found["y"]]


def test_a_batch_is_shared_out_by_batch_size() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x1:6+1x1:2") as dispatcher:
            assert await squares(dispatcher, 1, 2, 3, 4) == [1, 4, 9, 16]
            assert [each.batches for each in machine.all] == [[[1, 2, 3]], [[4]]]
            assert await squares(dispatcher, *range(20)) == [i * i for i in range(20)]  # more than fit at once

    play(main())


def test_requests_of_one_moment_run_together() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x2:8") as dispatcher:
            found = await asyncio.gather(*(squares(dispatcher, i) for i in range(8)))
            assert found == [[i * i] for i in range(8)]
            assert machine.all[0].batches == [list(range(8))]

    play(main())


def test_samples_that_the_model_refuses_take_no_others_with_them() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x2:8") as dispatcher:
            asked = [squares(dispatcher, i) for i in (1, POISON, 2, WRONG, DEADLY, 3)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [each for each in found if isinstance(each, list)] == [[1], [4], [9]]
            raised, nan, dead = (each for each in found if isinstance(each, RequestError))
            assert (raised.status, nan.status, dead.status) == (422, 422, 503)
            assert "poison" in raised.reason and "NaN" in nan.reason and "twice" in dead.reason
            assert counted(dispatcher, "worker_deaths") == 2 and dead.retry_s

    play(main())


def test_an_idle_process_that_dies_is_replaced_before_anybody_asks() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x2:8") as dispatcher:
            await asyncio.sleep(1)
            machine.all[0].kill()
            await asyncio.sleep(0.01)
            assert not dispatcher.ready
            assert await squares(dispatcher, 3) == [9]  # waits for the new one
            assert len(machine.all) == 2 and dispatcher.ready

    play(main())


def test_a_model_that_is_gone_is_an_answer_with_the_reason_until_it_is_back() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x2:8") as dispatcher:
            machine.failing = 3
            machine.all[0].kill()
            await asyncio.sleep(3)
            with pytest.raises(RequestError, match="the model is gone") as found:
                await squares(dispatcher, 3)
            assert found.value.status == 503
            await asyncio.sleep(60)
            assert await squares(dispatcher, 3) == [9]

    play(main())


def test_a_split_that_cannot_start_changes_nothing() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "2x1:4") as dispatcher:
            machine.failing = 1
            with pytest.raises(ForetraceError, match="gone"):
                await dispatcher.reconfigure(CoreSplit.parse("1x1:8+1x1:3"))
            assert len(machine.all) == 3 and machine.all[2].over  # the one that did start has been ended
            with pytest.raises(ForetraceError, match="at most the 2 cores"):
                await dispatcher.reconfigure(CoreSplit.parse("3x1:1"))
            assert await squares(dispatcher, 3) == [9]
            assert dispatcher.active is not None and dispatcher.active.split.text == "2x1:4"

    play(main())


def test_another_model_is_refused() -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x2:8") as dispatcher:
            dispatcher.facts = type(FACTS)(
                **{**{k: getattr(FACTS, k) for k in FACTS.__dataclass_fields__}, "fingerprint": 2}
            )
            with pytest.raises(ForetraceError, match="has changed"):
                await dispatcher.reconfigure(CoreSplit.parse("2x1:4"))

    play(main())


def test_what_waits_is_bounded_and_says_when_to_come_again() -> None:
    async def main() -> None:
        machine = Machine(seconds=2.0)
        async with serving(machine, "1x2:2", queue=10) as dispatcher:
            first = [asyncio.create_task(squares(dispatcher, i)) for i in range(12)]
            await asyncio.sleep(0.5)
            assert (dispatcher.waiting, dispatcher.running) == (8, 2)
            with pytest.raises(RequestError) as full:
                await squares(dispatcher, *range(10))
            assert full.value.status == 429 and full.value.retry_s == 1
            with pytest.raises(RequestError) as large:
                await squares(dispatcher, *range(11))
            assert large.value.status == 413
            found = await asyncio.gather(*first, return_exceptions=True)
            assert sum(isinstance(each, RequestError) and each.status == 429 for each in found) == 2

    play(main())


def test_deadlines_and_clients_that_left_free_the_queue() -> None:
    async def main() -> None:
        machine = Machine(seconds=1.0)
        async with serving(machine, "1x2:1") as dispatcher:
            slow = asyncio.create_task(squares(dispatcher, 1))
            late = asyncio.create_task(squares(dispatcher, 2, deadline_s=0.5))
            gone = asyncio.create_task(squares(dispatcher, 3))
            last = asyncio.create_task(squares(dispatcher, 4))
            await asyncio.sleep(0.1)
            gone.cancel()
            with pytest.raises(RequestError) as found:
                await late
            assert found.value.status == 504
            assert await slow == [1] and await last == [16]
            assert machine.all[0].batches == [[1], [4]]

    play(main())


def test_the_split_follows_the_load_and_no_request_is_refused() -> None:
    async def main() -> None:
        machine = Machine(seconds=0.0213, start_s=0.3)
        texts = {1: "1x2:1", 8: "2x1:4", 16: "1x2:16"}
        splits = {batch: CoreSplit.parse(text) for batch, text in texts.items()}
        async with serving(machine, "1x2:1") as dispatcher:
            following = asyncio.create_task(dispatcher.follow_load(splits, every_s=1.0))

            async def client(until_s: float) -> int:
                answered = 0
                while asyncio.get_running_loop().time() < until_s:
                    assert await squares(dispatcher, answered) == [answered**2]
                    answered += 1
                return answered

            for clients, text in ((24, "1x2:16"), (1, "1x2:1"), (11, "2x1:4")):
                until_s = asyncio.get_running_loop().time() + 6
                assert min(await asyncio.gather(*(client(until_s) for _ in range(clients)))) > 10
                assert dispatcher.active is not None and dispatcher.active.split.text == text
            assert counted(dispatcher, "reconfigurations") == 3
            following.cancel()

    play(main())


def test_a_bug_costs_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        machine = Machine()
        async with serving(machine, "1x2:8") as dispatcher:
            machine.all[0].inputs = {}  # what cannot be
            with pytest.raises(RequestError) as found:
                await squares(dispatcher, 1)
            assert found.value.status == 500
            assert await squares(dispatcher, 3) == [9] and len(machine.all) == 2

    play(main())
    assert "a batch was lost" in caplog.text


def test_closing_answers_what_is_here_and_refuses_what_comes() -> None:
    async def main() -> None:
        machine = Machine(seconds=1.0)
        async with serving(machine, "1x2:1") as dispatcher:
            here = [asyncio.create_task(squares(dispatcher, i)) for i in range(3)]
            await asyncio.sleep(0.1)
            closing = asyncio.create_task(dispatcher.close(60.0))
            await asyncio.sleep(0.1)
            with pytest.raises(RequestError) as found:
                await squares(dispatcher, 9)
            assert found.value.status == 503
            assert await asyncio.gather(*here) == [[0], [1], [4]]
            await closing
        async with serving(Machine(seconds=5.0), "1x2:1") as dispatcher:
            here = [asyncio.create_task(squares(dispatcher, i)) for i in range(3)]
            await asyncio.sleep(0.1)
            await dispatcher.close(1.0)  # not enough for all
            ends = await asyncio.gather(*here, return_exceptions=True)
            assert ends[0] == [0] and all(isinstance(each, RequestError) for each in ends[1:])

    play(main())


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 0.2),
        st.one_of(
            st.tuples(
                st.just("ask"),
                st.lists(st.sampled_from([*range(9), 7, 8, POISON, WRONG, DEADLY]), min_size=1, max_size=9),
            ),
            st.tuples(st.just("leave"), st.integers(0, 99)),
            st.tuples(st.just("hurry"), st.floats(0.001, 0.1)),
            st.tuples(st.just("kill"), st.integers(0, 99)),
            st.tuples(st.just("change"), st.sampled_from(SPLITS)),
            st.tuples(st.just("fail"), st.integers(1, 2)),
        ),
    ),
    max_size=60,
)


@given(events=EVENTS, start_s=st.floats(0, 0.3), seconds=st.floats(0.001, 0.05))
def test_every_request_has_one_outcome_and_the_right_one(
    events: list[tuple[float, tuple[str, object]]], start_s: float, seconds: float
) -> None:
    async def main() -> None:
        machine = Machine(seconds, start_s)
        asked: list[tuple[list[int], bool, asyncio.Task[list[int]]]] = []
        changes: list[asyncio.Task[None]] = []
        troubled = False
        async with serving(machine, "2x1:4") as dispatcher:
            for wait_s, (what, value) in events:
                await asyncio.sleep(wait_s)
                match what, value:
                    case "ask", list():
                        asked.append((value, False, asyncio.create_task(squares(dispatcher, *value))))
                    case "hurry", float():
                        asked.append(([5], True, asyncio.create_task(squares(dispatcher, 5, deadline_s=value))))
                    case "leave", int() if asked:
                        numbers, _, task = asked[value % len(asked)]
                        asked[value % len(asked)] = (numbers, True, task)
                        task.cancel()
                    case "kill", int() if machine.living:
                        machine.living[value % len(machine.living)].kill()
                        troubled = True
                    case "change", CoreSplit():
                        changes.append(asyncio.create_task(dispatcher.reconfigure(value)))
                    case "fail", int():
                        machine.failing, troubled = value, True
            found = await asyncio.gather(*(task for *_, task in asked), return_exceptions=True)
            for (numbers, hurried, _), outcome in zip(asked, found, strict=True):
                if isinstance(outcome, list):
                    assert outcome == [each * each for each in numbers] and not {POISON, WRONG, DEADLY} & {*numbers}
                elif isinstance(outcome, asyncio.CancelledError):
                    assert hurried
                else:
                    assert isinstance(outcome, RequestError)
                    guilty = {POISON, WRONG, DEADLY} & {*numbers}
                    late = hurried and outcome.status == 504
                    assert guilty or late or (outcome.status == 503 and troubled)
            for change in await asyncio.gather(*changes, return_exceptions=True):
                assert change is None or isinstance(change, ForetraceError)

    play(main())
