"""The controller: models travel, bytes are counted, the knob climbs on what is stated."""

from __future__ import annotations

from functools import partial

import pytest

from foretrace.errors import ForetraceError
from foretrace.training.workers.policies import parse
from foretrace.training.workers.virtual import WorkerTimes, train
from foretrace.zoo.partitioned import PartitionedJob
from reproductions.skewscout.controller import ScoutedServer, SkewScout, climbed


def test_models_travel_and_their_bytes_count() -> None:
    job = PartitionedJob(partition="pathological classes=3")
    times = WorkerTimes(step_s=(0.1,) * 4)
    scout = SkewScout(knobs=(4,), every=20)  # one knob: the policy stays as it is
    plain = train(parse("local-sgd every=4"), job.replicas(), times, steps=400)
    watched = train(
        parse("local-sgd every=4"), job.replicas(), times, steps=400, serve=partial(ScoutedServer, scout=scout)
    )
    assert watched.server.model.tobytes() == plain.server.model.tobytes()
    assert isinstance(watched.server, ScoutedServer)
    controller = watched.server.scout
    assert controller.travels > 1
    model = 4 * len(watched.server.model)
    extra = sum(watched.sent_bytes) - sum(plain.sent_bytes)
    assert extra % (4 * model) == 0 and extra / (4 * model) in (controller.travels, controller.travels + 1)
    assert sum(watched.answered_bytes) - sum(plain.answered_bytes) == 4 * model * controller.travels


def test_skew_is_seen() -> None:
    lost = {}
    for text in ("iid", "pathological classes=3"):
        job = PartitionedJob(partition=text, rate=0.2)
        run = train(parse("local-sgd every=20"), job.replicas(), WorkerTimes(step_s=(0.1,) * 4), steps=800,
                    serve=partial(ScoutedServer, scout=SkewScout(knobs=(20,), every=60)))  # fmt: skip
        assert isinstance(run.server, ScoutedServer)
        lost[text] = max(each for _, each, _ in run.server.scout.history)
    assert lost["pathological classes=3"] > lost["iid"] + 0.1


def test_the_knob_climbs_to_the_least_objective() -> None:
    known: dict[int, float] = {}
    costs, at = [5.0, 3.0, 1.0, 2.0, 4.0], 0
    for _ in range(8):
        known[at] = costs[at]
        at = climbed(at, known, len(costs), looser=True)
    assert at == 2
    assert SkewScout(knobs=(1,)).objective(0.15, 0.2) == pytest.approx(50 * 0.1 + 0.2)


def test_what_has_no_knob_is_one_sentence() -> None:
    for policy in ("synchronous", "adsp"):
        with pytest.raises(ForetraceError, match="needs a policy with a knob"):
            SkewScout(knobs=(1, 2)).controller(parse(policy), 2)
    with pytest.raises(ForetraceError, match="all different"):
        SkewScout(knobs=(1, 1))
