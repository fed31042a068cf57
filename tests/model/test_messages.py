"""Messages of a step: what is sent, when, and what it costs beside computing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.network.parse import network
from foretrace.graph.taskgraph import Phase, TaskKind
from foretrace.hardware.devices import named
from foretrace.model.estimate import Estimate, estimate
from foretrace.model.memory.memory import Sharding
from foretrace.model.messages import DATA, TENSOR, ModelCollective, collectives
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.repeat import again
from foretrace.model.target import networks_of, target
from foretrace.simulate.check import CheckVerdict, check

torch = pytest.importorskip("torch")

from foretrace.model.capture.capture import capture  # noqa: E402
from foretrace.model.decoder_config import DecoderConfig, share  # noqa: E402
from foretrace.model.decoder_modules import training_of  # noqa: E402

LAYERS = 4
SMALL = DecoderConfig(name="small", layers=LAYERS, hidden=512, heads=8, kv_heads=8, inner=1024, words=2048, length=256)


@pytest.fixture(scope="module")
def operators() -> OperatorGraph:
    return capture(training_of(SMALL), precision="bf16-weights", update="fused")


def sent(
    operators: OperatorGraph, sharding: Sharding, *, accumulate: int = 1, recompute: int = 0
) -> tuple[OperatorGraph, list[ModelCollective]]:
    repeated, origin = again(operators, recompute=recompute, accumulate=accumulate, sharding=sharding)
    return repeated, collectives(operators, repeated, origin, sharding=sharding)


def asked(operators: OperatorGraph, sharding: Sharding, link: str = "", **settings: Any) -> Estimate:
    on = target("h100")
    networks = {lane: network(link, 8) for lane in (DATA, TENSOR)} if link else networks_of(on.device, sharding)
    return estimate(operators, device=on.device, costs=on.costs, sharding=sharding, network=networks, **settings)


def of_role(operators: OperatorGraph, role: Role) -> int:
    return sum(each.nbytes for each in operators.storages if each.role == role)


@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_blocks_are_gathered_for_every_pass(operators: OperatorGraph, accumulate: int, recompute: int) -> None:
    step, found = sent(operators, Sharding(workers=8, stage=3), accumulate=accumulate, recompute=recompute)
    gathers = [each for each in found if each.kind == CollectiveKind.ALL_GATHER]
    scatters = [each for each in found if each.kind == CollectiveKind.REDUCE_SCATTER]
    assert len(gathers) == 2 * LAYERS * accumulate + 1  # and what no block holds, once
    assert len(scatters) == LAYERS * accumulate + 1
    root = next(each for each in gathers if each.issued < 0)
    assert sum(each.nbytes for each in gathers) - root.nbytes == pytest.approx(
        2 * accumulate * (of_role(operators, Role.WEIGHT) - root.nbytes)
    )
    update = next(i for i, node in enumerate(step.nodes) if node.phase == Phase.OPTIMIZER)
    for each in found:
        assert each.after < each.before and each.issued <= each.before  # nothing waits for what comes later
        assert each.before <= update
    # A block's scatter follows its last backward node, also where that pass computes it again first.
    for each in scatters[:-1]:
        assert step.nodes[each.after].phase == Phase.BACKWARD
        assert step.nodes[each.after].layer.startswith(each.name.removeprefix("reduce-scatter "))


@pytest.mark.parametrize(("stage", "times"), [(0, 1), (1, 1), (2, 3)])
def test_gradients_are_sent_once_or_in_every_micro_batch(operators: OperatorGraph, stage: int, times: int) -> None:
    step, found = sent(operators, Sharding(workers=8, stage=stage), accumulate=3)
    kind = CollectiveKind.ALL_REDUCE if stage == 0 else CollectiveKind.REDUCE_SCATTER
    buckets = [each for each in found if each.kind == kind]
    assert sum(each.nbytes for each in buckets) == times * of_role(operators, Role.GRADIENT)
    gathers = [each for each in found if each.kind == CollectiveKind.ALL_GATHER]
    assert [each.nbytes for each in gathers] == ([of_role(operators, Role.WEIGHT)] if stage else [])
    assert all(each.before == len(step) for each in gathers)


def test_tensor_groups_add_up_four_times_a_block() -> None:
    mine = capture(training_of(share(SMALL, 4)), precision="bf16-weights", update="fused")
    whole = SMALL.parameters
    assert whole / 4 < mine.parameters < whole / 3.8  # norms are everybody's
    _, found = sent(mine, Sharding(tensor=4))
    names = Counter(each.name.split(" ")[1] for each in found)
    assert names == {"result": 2 * LAYERS, "gradient": 2 * LAYERS, "embedding": 1, "scores": 1}
    assert {each.nbytes for each in found} == {SMALL.length * SMALL.hidden * 2}
    # The device waits for each.
    estimated = asked(mine, Sharding(tensor=4))
    assert estimated.step.exposed_s <= estimated.step.exchange_s * (1 + 1e-9)
    slow = asked(mine, Sharding(tensor=4), link="100mbit")
    assert slow.step.exposed_s > 0.95 * slow.step.exchange_s


def test_a_share_of_the_update(operators: OperatorGraph) -> None:
    def update(sharding: Sharding) -> float:
        found = asked(operators, sharding, "400gbit")
        rows = np.array([node.phase == Phase.OPTIMIZER for node in found.operators.nodes])
        return float(found.operators.calls.nbytes[rows].sum())

    one = update(Sharding())
    assert update(Sharding(workers=8)) == one
    assert [update(Sharding(workers=8, stage=stage)) for stage in (1, 2, 3)] == pytest.approx([one / 8] * 3)
    assert update(Sharding(workers=8, stage=3, master=True)) == pytest.approx(one / 4)  # float32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_messages_take_as_long_as_the_network_lets_them(operators: OperatorGraph, stage: int) -> None:
    sharding = Sharding(workers=8, stage=stage)
    times = [asked(operators, sharding, link).step for link in ("1gbit", "10gbit", "3200gbit")]
    assert times[0].step_time_s > times[1].step_time_s >= times[2].step_time_s
    for each in times:
        assert each.interval_s[0] < each.step_time_s < each.interval_s[1]
        assert each.step_time_s >= each.exchange_s  # one lane
    graph = times[0].lowered.graph
    assert all(each.verdict != CheckVerdict.FAIL for each in check(graph).findings)
    assert (graph.kind == TaskKind.COLLECTIVE).sum() == len(times[0].lowered.sent)
    assert graph.info.recording["distributed"]["backend"] == "nccl"


def test_what_joins_machines_is_asked_for_where_nobody_knows() -> None:
    from foretrace.errors import ForetraceError

    with pytest.raises(ForetraceError, match="`network=200gbit`"):
        networks_of(named("A100-SXM4-40GB"), Sharding(workers=64, stage=3))
    assert networks_of(named("A100-SXM4-40GB"), Sharding(workers=8, stage=3))[DATA].workers == 8
    assert networks_of(named("mi300x"), Sharding(workers=8))[DATA].workers == 8
    with pytest.raises(ForetraceError, match="devices of a machine"):
        networks_of(named("h100"), Sharding(tensor=16))
