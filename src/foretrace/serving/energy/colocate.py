"""Fine-tuning beside inference on the same core: what a request takes then, and which step is admitted.

Devices without a way to be split share their time between both, so a fine-tuning step in flight delays a request. A
linear regression (in logarithms) predicts the latency from FLOPs of the forward and backward pass, arithmetic intensity
and batch sizes; a step is admitted only where the upper end of that prediction keeps the limit (PolyThrottle, 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from time import perf_counter

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.messages import Worker
from foretrace.experiment.processes import START_S, AskedCall, Workers, alone
from foretrace.experiment.statistics import paired_ratio
from foretrace.experiment.trial import TriedPrediction, figured, in_turns
from foretrace.graph.taskgraph import Phase
from foretrace.serving.energy.tune import limit
from foretrace.serving.server.models import ModelSource, import_torch
from foretrace.serving.server.split import ModelInstance
from foretrace.serving.server.worker import ModelWorker
from foretrace.zoo.operators import operators_of
from foretrace.zoo.registry import entry, training

KNOWN = (1, 4, 16)  # samples of requests and of steps that the law is fitted to
UNKNOWN = (2, 8)  # and those that it is held against
ARMS = ("alone", "always", "admitted")
_RIDGE = np.geomspace(1e-4, 1.0, 9)
_LEAST_RANGE = 0.05  # of the latency
_ROUNDS = 9  # of every pair
_MOST_REQUESTS = 100_000  # of an arm


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """A forward pass, or a training step, at a batch size."""

    batch: int
    forward_flops: float
    backward_flops: float  # 0 of inference
    intensity: float  # FLOPs per byte moved


@dataclass(frozen=True, kw_only=True)
class InterferenceLaw:
    """Latency of a request while a fine-tuning step runs."""

    weights: Float64  # a constant, then of `_features`
    error: float  # of the logarithm: largest of the fitted pairs, each predicted without itself, and what varies

    @classmethod
    def fit(
        cls, pairs: Sequence[tuple[PassWork, PassWork]], latency_s: Sequence[float], noise: Sequence[float] = ()
    ) -> InterferenceLaw:  # fmt: skip
        """Fit by ridge regression; how strong a ridge is what predicts each pair best from the others.

        `noise` is how far the latency of each pair may be off as it was measured, of its logarithm: which process the
        scheduler lets go first decides over short requests, so that a median may lie at either end. Raises
        ForetraceError for fewer than four pairs.
        """
        if len(pairs) < 4:
            raise ForetraceError(f"an interference law needs 4 pairs or more, got {len(pairs)}; measure more.")
        rows = np.array([_features(*pair) for pair in pairs])
        scale = np.maximum(rows.std(axis=0), 1e-9)
        x = np.column_stack([np.ones(len(rows)), (rows - rows.mean(axis=0)) / scale])
        y, best = np.log(latency_s), None
        for ridge in _RIDGE:
            penalty = ridge * len(rows) * np.diag([0.0, *np.ones(x.shape[1] - 1)])
            solve = np.linalg.solve(x.T @ x + penalty, x.T)
            left_out = (y - x @ solve @ y) / (1 - np.diag(x @ solve))  # each predicted from the others
            error = float(np.abs(left_out).max())
            if best is None or error < best[0]:
                best = error, solve @ y
        assert best is not None
        weights = best[1][1:] / scale
        error = float(np.hypot(best[0], max(noise, default=0.0)))
        return cls(weights=np.array([best[1][0] - weights @ rows.mean(axis=0), *weights]), error=error)

    def latency_s(self, request: PassWork, step: PassWork) -> tuple[float, float, float]:
        """Return seconds of a request with that step in flight, and where they lie."""
        value = float(np.exp(np.array([1.0, *_features(request, step)]) @ self.weights))
        width = max(float(np.expm1(self.error)), _LEAST_RANGE)
        return value, value / (1 + width), value * (1 + width)

    def admitted(self, request: PassWork, steps: Sequence[PassWork], limit_s: float) -> PassWork | None:
        """Return the largest step beside which the request keeps the limit even at the upper end; None where
        none is.
        """
        kept = [step for step in steps if self.latency_s(request, step)[2] <= limit_s]
        return max(kept, key=lambda step: step.batch, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedArm:
    """Requests with no step beside them, with one always, or with those that are admitted."""

    name: str
    p50_s: float
    p99_s: float
    within: float  # share of the requests that kept the limit
    tuned_per_s: float  # samples that were fine-tuned, per second


@dataclass(frozen=True, kw_only=True)
class Colocation:
    """What became of fine-tuning beside inference here."""

    model: str
    tuned: str
    size: str
    seed: int
    slo: str
    limit_s: float
    error: float
    pairs: dict[tuple[int, int], TriedPrediction]  # samples of a request and a step that the law was not fitted to
    arms: tuple[ColocatedArm, ...]
    alone_s: dict[int, float]  # by samples of a request

    def rows(self) -> list[Row]:
        """Return what the ledger keeps, a row per pair that was held out."""
        return [
            trial.row(
                f"energy-colocate latency.{request}+{step}", model=self.model, size=self.size,
                parameters={"request": request, "step": step, "tuned": self.tuned},
            )
            for (request, step), trial in self.pairs.items()
        ]  # fmt: skip


def colocate(
    model: str, tuned: str, *, slo: str, size: str = "tiny", seconds: float = 20.0, core: int = 0, seed: int = 0,
    tell: Callable[[float], None] | None = None,
) -> Colocation:  # fmt: skip
    """Measure pairs, fit the law, hold it against other pairs, and serve requests with each way to admit steps.

    Args:
        model: whose requests come, of the zoo.
        tuned: what is fine-tuned, of the zoo.
        slo: limit of a request's latency; 1.5x is of the largest request alone.
        size: tiny or full.
        seconds: of requests, for all arms together.
        core: that both processes share.
        seed: of the sizes of requests.
        tell: hears of the share that is done.

    """
    say = tell or (lambda share: None)
    limit(slo, 1.0)  # what cannot be is refused before anything is measured
    for each in (model, tuned):
        entry(each)
    batches = sorted((*KNOWN, *UNKNOWN))
    requests = {batch: work_of(model, batch, size=size, train=False) for batch in batches}
    steps = {batch: work_of(tuned, batch, size=size, train=True) for batch in batches}
    with _sharing(model, tuned, size, max(batches), core) as (worker, tuner):

        def together(request: int, step: int) -> float:
            calls = [AskedCall(fine_tune, step)]
            if step:
                tuner.submit(calls, f"fine-tuning {tuned}")
            began = perf_counter()
            worker.submit(request)
            if said := worker.receive().error:
                raise ForetraceError(f"{model} does not run with {request} samples: {said}.")
            latency_s = perf_counter() - began
            if step:
                tuner.collect(calls, f"fine-tuning {tuned}")
            return latency_s

        pairs = [(request, step) for group in (KNOWN, UNKNOWN) for request in group for step in group]
        met = in_turns(
            [*pairs, *((each, 0) for each in batches)], lambda pair, _: together(*pair), _ROUNDS, warm_up=1,
            tell=lambda share: say(0.5 * share),
        )  # fmt: skip
        median = {pair: float(np.median(each)) for pair, each in met.items()}
        known = [pair for pair in pairs if pair[0] in KNOWN]
        law = InterferenceLaw.fit(
            [(requests[a], steps[b]) for a, b in known], [median[pair] for pair in known],
            [max(np.log([own.high / own.value, own.value / own.low]))
             for pair in known for own in [paired_ratio([1.0] * len(met[pair]), met[pair], seed=seed)]],
        )  # fmt: skip
        limit_s = limit(slo, median[max(batches), 0])
        asked, began = Random(seed).choices(batches, k=_MOST_REQUESTS), perf_counter()
        quickest_s = min(median[batch, 0] for batch in batches)
        if limit_s < quickest_s:
            raise ForetraceError(
                f"`slo={slo}` is kept by no request: the quickest takes {quickest_s:.3g} s; allow more."
            )

        def serve(arm: str, number: int) -> tuple[float, float, int]:
            """Return the latency of a request, seconds until its step had ended, too, and samples of that."""
            best = law.admitted(requests[asked[number]], list(steps.values()), limit_s) if arm == "admitted" else None
            step = max(batches) if arm == "always" else best.batch if best else 0
            began = perf_counter()
            return together(asked[number], step), perf_counter() - began, step

        served = in_turns(
            ARMS, serve, _MOST_REQUESTS, seconds=seconds,
            tell=lambda _: say(min(0.5 + 0.5 * (perf_counter() - began) / seconds, 1.0)),
        )  # fmt: skip
    return Colocation(
        model=model, tuned=tuned, size=size, seed=seed, slo=slo, limit_s=limit_s, error=law.error,
        pairs={
            (a, b): figured(law.latency_s(requests[a], steps[b]), met[a, b], seed=seed)
            for a, b in pairs if (a, b) not in known
        },
        arms=tuple(
            ColocatedArm(
                name=arm, p50_s=float(np.quantile(each, 0.5)), p99_s=float(np.quantile(each, 0.99)),
                within=float(np.mean(each <= limit_s)), tuned_per_s=float(samples.sum() / spent.sum()),
            )
            for arm, rounds in served.items() for each, spent, samples in [np.array(rounds).T]
        ),
        alone_s={batch: median[batch, 0] for batch in batches},
    )  # fmt: skip


def work_of(model: str, batch: int, *, size: str, train: bool) -> PassWork:
    """Return FLOPs and intensity of a step or forward pass, without running it."""
    graph = operators_of(model, size=size, batch=batch, training=train, like="cpu")
    backward = sum(node.flops for node in graph.nodes if node.phase == Phase.BACKWARD)
    return PassWork(
        batch=batch, forward_flops=graph.flops - backward, backward_flops=backward,
        intensity=graph.flops / max(graph.nbytes, 1.0),
    )  # fmt: skip


def _features(request: PassWork, step: PassWork) -> tuple[float, ...]:
    amounts = (
        request.forward_flops, request.intensity, request.batch,
        step.forward_flops, step.backward_flops, step.intensity, step.batch,
    )  # fmt: skip
    return tuple(np.log(np.maximum(amounts, 1e-9)).tolist())


@contextmanager
def _sharing(model: str, tuned: str, size: str, batch: int, core: int) -> Iterator[tuple[ModelWorker, Workers]]:
    """Run a process that answers requests and one that fine-tunes, on one core."""
    worker = ModelWorker(ModelSource(name=model, size=size), ModelInstance(1, batch), (core,), first=True)
    try:
        with alone(cores=(core,)) as tuner:
            worker.ready()
            tuner.ask(prepare, FineTuned(model=tuned, size=size), f"loading {tuned}", seconds=START_S)
            yield worker, tuner
    except EOFError:
        raise ForetraceError(f"the process of {model} died; has it too little memory?") from None
    finally:
        worker.end()


class FineTuned(msgspec.Struct, frozen=True, kw_only=True):
    """A training of the zoo."""

    model: str
    size: str


def prepare(given: FineTuned, worker: Worker) -> None:
    """Load a training, in a process of its own."""
    import_torch().set_num_threads(1)
    worker.kept = {"training": training(given.model, given.size), "batches": {}}


def fine_tune(samples: int, worker: Worker) -> None:
    """Take a step of so many samples."""
    from foretrace.training.batches import resized

    job, batches = worker.kept["training"], worker.kept["batches"]
    if samples not in batches:
        batches[samples] = next(iter(resized(job.loader, samples)))
    job.step(batches[samples])
