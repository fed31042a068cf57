"""The whole search on small recordings: what is found, what is refused, what is kept and gone on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import foretrace as ft
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.model.messages import MIB
from foretrace.plan import answer as answers
from foretrace.plan import optimise as module
from foretrace.plan.buckets import best_buckets, default
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.optimise import FUSION, Optimiser
from foretrace.plan.predictions import Peak
from foretrace.plan.problem import Plan
from foretrace.plan.recorded import Planned, alone
from foretrace.plan.result import Answer, OptimiseRequest
from foretrace.simulate.timeline import simulate
from foretrace.testing.workloads import Gpu, optimizer_facts

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def recommender() -> TaskGraph:
    return ft.read(DATA / "recommender.json.gz").graph().graph


@pytest.fixture(scope="module")
def cnn() -> TaskGraph:
    return ft.read(DATA / "cnn.json.gz").graph().graph


def found(graph: TaskGraph, monkeypatch: pytest.MonkeyPatch, **wanted: object) -> Answer:
    """The answer with no technique but the buckets: the search of sets takes seconds."""
    monkeypatch.setattr(module, "FASTER", ())
    return Optimiser(recorded=graph, wanted=OptimiseRequest(**wanted)).run()  # type: ignore[arg-type]


def test_buckets_alone_leave_all_else_as_it_is(recommender: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = OptimiseRequest(workers=4, network="1gbit", only_buckets=True, ahead=False)
    alone = Optimiser(recorded=recommender, wanted=wanted).run()
    assert not alone.best.techniques and alone.sets == 1
    assert alone.step_s == found(recommender, monkeypatch, workers=4, network="1gbit", ahead=False).step_s


@pytest.mark.parametrize("network", ["1gbit/50us", "100mbit", "10gbit/20us"])
def test_the_coarse_view_of_a_recording_reckons_as_the_whole_graph(recommender: TaskGraph, network: str) -> None:
    parallel = Planned(workers=4, network=network, company=1.0)  # messages that slow nothing down
    problem = parallel.problem(recommender)
    evaluate = Evaluator.of(problem)
    for plan in (default(problem), Plan.single(len(problem)), best_buckets(evaluate).plan):
        whole = simulate(parallel.with_plan(problem, plan).predict(recommender)).step_time_s
        assert evaluate.step_ns(plan) == pytest.approx(1e9 * whole, rel=1e-3)


@pytest.mark.parametrize("network", ["1gbit", "10gbit", "100gbit"])
def test_a_host_that_runs_ahead_of_its_device_is_reckoned_with(network: str) -> None:
    graph = Gpu(kernel_us=20, recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph()
    parallel = Planned(workers=4, network=network, gradient_mb=4.0, company=1.0, views=True)
    problem = parallel.problem(graph)
    evaluate = Evaluator.of(problem)
    for plan in (default(problem), Plan.single(len(problem)), best_buckets(evaluate).plan):
        whole = simulate(parallel.with_plan(problem, plan).predict(graph)).step_time_s
        assert evaluate.step_ns(plan) == pytest.approx(1e9 * whole, rel=0.02)


def test_one_step_on_a_device_tells_nothing_about_an_exchange() -> None:
    graph = Gpu(recording=optimizer_facts(6, 60_000, "SGD", momentum=0.9)).graph()
    short = replace(graph, marks=graph.marks[:2])
    cut = short.with_columns(step=np.where(graph.step == 0, 0, -1).astype(np.int32))
    with pytest.raises(ForetraceError):
        Optimiser(recorded=cut, wanted=OptimiseRequest(workers=4, network="1gbit", gradient_mb=4.0)).run()


def test_what_is_found_is_no_worse_than_any_single_size(
    recommender: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = found(recommender, monkeypatch, workers=8, network="10gbit/20us")
    assert answer.best.found is not None and answer.best.found.proven
    assert answer.step_s <= answer.default_s
    assert abs(answer.difference) < 0.03
    for size in (0.1, 0.5, 1.0, 25.0):
        single = Planned(workers=8, network="10gbit/20us", views=True, bucket_mb=size)
        assert answer.step_s <= simulate(single.predict(recommender)).step_time_s * 1.01


def test_gains_add_up(recommender: TaskGraph) -> None:
    answer = Optimiser(recorded=recommender, wanted=OptimiseRequest(workers=4, network="1gbit/50us", rounds=1)).run()
    assert FUSION in [gain.name for gain in answer.gains] or FUSION in [each.name for each in answer.left_out]
    saved = sum(gain.saved_s for gain in answer.gains)
    assert answer.default_s - saved == pytest.approx(answer.step_s, rel=5e-3)
    for gain in answer.gains:
        assert gain.saved_s > 0
    assert answer.overtaking is not None
    assert answer.overtaking.step_s >= answer.overtaking.bound_s
    low, high = answer.whatif.interval_s
    assert low <= answer.step_s <= high


def test_one_worker_has_nothing_to_exchange(recommender: TaskGraph) -> None:
    answer = Optimiser(recorded=recommender, wanted=OptimiseRequest()).run()
    assert answer.problem is None and answer.overtaking is None
    assert answer.default_s == answer.recorded_s
    assert answer.step_s < answer.recorded_s
    assert answers.configuration(answer).buckets == ()


def test_a_faster_network_is_never_worse(recommender: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [
        found(recommender, monkeypatch, workers=4, network=each, ahead=False).best.step_s
        for each in ("100mbit", "1gbit", "10gbit")
    ]
    assert times == sorted(times, reverse=True)


def test_a_recording_that_exchanged_is_taken_alone(recommender: TaskGraph) -> None:
    parallel = Planned(workers=4, network="1gbit/50us")
    exchanged = parallel.predict(recommender)
    with pytest.raises(NotApplicableError, match="already exchanges"):
        parallel.problem(exchanged)
    quiet = alone(exchanged)
    assert not (quiet.kind == TaskKind.COLLECTIVE).any()
    assert len(parallel.problem(quiet)) == len(parallel.problem(recommender))


def test_interrupted_and_resumed_is_as_never_interrupted(
    cnn: TaskGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FASTER", module.FASTER[-1:])
    wanted = OptimiseRequest(workers=4, network="100mbit/50us", rounds=3)
    whole = Optimiser(recorded=cnn, wanted=wanted).run()
    state = tmp_path / "state.json"
    first = Optimiser(recorded=cnn, wanted=replace(wanted, rounds=1), state=state).run(1e-9)
    assert not first.finished
    part = Optimiser(recorded=cnn, wanted=replace(wanted, rounds=1), state=state).run()
    assert state.exists()
    resumed = Optimiser(recorded=cnn, wanted=wanted, state=state).run()
    assert part.overtaking is not None and resumed.overtaking is not None and whole.overtaking is not None
    assert part.overtaking.rounds <= resumed.overtaking.rounds
    assert resumed.overtaking.plan == whole.overtaking.plan
    assert resumed.overtaking.step_s == whole.overtaking.step_s
    assert resumed.overtaking.evaluations == whole.overtaking.evaluations
    assert resumed.step_s == whole.step_s
    assert [str(each) for each in resumed.best.chain] == [str(each) for each in whole.best.chain]
    assert [gain.name for gain in resumed.gains] == [gain.name for gain in whole.gains]


def test_a_foreign_state_is_refused(
    cnn: TaskGraph, recommender: TaskGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FASTER", ())
    state = tmp_path / "state.json"
    wanted = OptimiseRequest(workers=2, network="1gbit", rounds=1)
    Optimiser(recorded=cnn, wanted=wanted, state=state).run()
    with pytest.raises(ForetraceError, match="another recording"):
        Optimiser(recorded=recommender, wanted=wanted, state=state).run()
    with pytest.raises(ForetraceError, match="another recording"):
        Optimiser(recorded=cnn, wanted=replace(wanted, workers=3), state=state).run()
    for text in ("", "{}", "[1]", json.dumps({"of": 1, "sets": 3, "overtaking": None})):
        state.write_text(text)
        with pytest.raises(ForetraceError, match="no state of a search"):
            Optimiser(recorded=cnn, wanted=wanted, state=state).run()


def test_interrupting_gives_the_best_so_far(recommender: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = Optimiser._best

    def interrupted(self: Optimiser, graph: TaskGraph, parallel: Planned) -> object:
        tried.append(1)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return real(self, graph, parallel)

    monkeypatch.setattr(Optimiser, "_best", interrupted)
    answer = Optimiser(recorded=recommender, wanted=OptimiseRequest(workers=4, network="1gbit")).run()
    assert not answer.finished
    assert answer.best.techniques == ()
    assert answer.step_s <= answer.default_s * 1.001


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"workers": 0}, "1 or more"),
        ({"workers": -3, "network": "1gbit"}, "1 or more"),
        ({"workers": 4}, "need a network"),
        ({"network": "1gbit"}, "add `workers=N`"),
        ({"workers": 4, "network": "-1gbit"}, "gbit"),
        ({"workers": 4, "network": "0gbit"}, "gbit"),
        ({"memory_limit": -5}, "above 0"),
        ({"memory_limit": 10**9}, "shows memory"),
    ],
)
def test_what_cannot_be_is_said(recommender: TaskGraph, wanted: dict[str, object], says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        Optimiser(recorded=recommender, wanted=OptimiseRequest(**wanted)).run()  # type: ignore[arg-type]


def test_without_gradients_there_is_nothing_to_optimise(recommender: TaskGraph) -> None:
    info = replace(recommender.info, recording={})
    keep = [name if "AccumulateGrad" not in name else "other" for name in recommender.names]
    blind = replace(recommender, info=info, names=tuple(keep))
    with pytest.raises(ForetraceError, match=r"when gradients become ready.*`gradient_mb="):
        Optimiser(recorded=blind, wanted=OptimiseRequest(workers=4, network="1gbit")).run()


class TestMemory:
    PEAK = Peak(recorded=1_000_000_000, activations=800_000_000)

    def test_what_need_not_be_kept_is_taken_off(self, cnn: TaskGraph) -> None:
        from foretrace.techniques import GradientAccumulation

        after = GradientAccumulation(steps=2).predict(cnn)
        assert self.PEAK.after(cnn, since=len(cnn.changes)) == 1_000_000_000
        assert self.PEAK.after(after, since=len(cnn.changes)) == pytest.approx(600_000_000, rel=0.02)

    def test_a_limit_brings_the_techniques_that_save(self, cnn: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "FASTER", ())
        wanted = OptimiseRequest(workers=2, network="1gbit", memory_limit=650_000_000, rounds=1)
        answer = Optimiser(recorded=cnn, wanted=wanted, peak=self.PEAK).run()
        assert answer.best.memory is not None and answer.best.memory <= 650_000_000
        assert answers.configuration(answer).accumulation_steps > 1 or answers.configuration(answer).recompute

    def test_an_impossible_limit_names_the_smallest_that_is_possible(
        self, cnn: TaskGraph, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "FASTER", ())
        wanted = OptimiseRequest(workers=2, network="1gbit", memory_limit=100_000_000)
        with pytest.raises(ForetraceError, match=r"no step fits into 0.1 GB; the least that was found is 0\.\d+ GB"):
            Optimiser(recorded=cnn, wanted=wanted, peak=self.PEAK).run()


def test_the_configuration_gives_ddp_the_very_buckets(recommender: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = found(recommender, monkeypatch, workers=8, network="10gbit/20us", ahead=False)
    chosen = answers.configuration(answer)
    problem = answer.problem
    assert problem is not None and answer.best.found is not None
    caps = [round(size * MIB) for size in chosen.bucket_cap_mb_list]
    assert sum(caps) == problem.nbytes.sum()
    buckets = answer.best.parallel.buckets(problem.nbytes.tolist()) if answer.best.parallel else []
    assert [bucket[-1] for bucket in buckets] == list(answer.best.found.plan.ends)
    assert json.loads(json.dumps(answers.as_json(chosen)))["distributed_data_parallel"]["gradient_as_bucket_view"]


def test_the_snippet_makes_the_buckets_for_real(tmp_path: Path, cnn: TaskGraph) -> None:
    torch = pytest.importorskip("torch")
    from torch import distributed

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    sizes: list[int] = []  # in the order in which gradients become ready
    hooks = [p.register_post_accumulate_grad_hook(lambda p: sizes.append(4 * p.numel())) for p in model.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(4, 64)).square().mean().backward()
    for hook in hooks:
        hook.remove()
    ends = (2, 7, 11)
    caps = tuple(each / MIB for each in np.add.reduceat(np.array(sizes), [0, *(end + 1 for end in ends[:-1])]).tolist())
    chosen = answers.Configuration(
        buckets=(answers.Bucket(first="a", last="b", gradients=3, bytes=1),) * 3,
        bucket_cap_mb_list=caps,
        bucket_cap_mb=1.0,
        bucket_cap_step_s=None,
        gradient_as_bucket_view=True,
        autocast="bfloat16",
        compile_mode=None,
        regions=(),
        fused_optimizer=True,
        accumulation_steps=2,
        recompute="auto",
    )
    names: dict[str, object] = {}
    exec(compile(answers.snippet(chosen), "snippet.py", "exec"), names)
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrapped = names["prepare"](model)  # type: ignore[operator]
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, **names["OPTIMIZER"])  # type: ignore[arg-type]
        for _ in range(3):
            with names["precision"]("cpu"):  # type: ignore[operator]
                loss = wrapped(torch.randn(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        logged = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        distributed.destroy_process_group()
    assert [int(each) for each in logged.split(",")] == [round(cap * MIB) for cap in caps]
