"""`gradient-compression`: data-parallel workers send fewer bytes and pay for it with encoding and decoding.

It changes the messages that `data-parallel` put in, bucket by bucket, as a communication hook does: encode when a
bucket is full, send, decode when everyone's part is there. Averaging stays all-reduce where codes can be added up (16
bit, PowerSGD, random-k with a common seed); elsewhere everyone gathers everyone's codes and decodes them all, so bytes
and decoding grow with the workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import Change, TaskGraph
from foretrace.hardware.devices import catalog, find
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.distributed.coding import PRIOR, Coding, by_traffic, timed
from foretrace.techniques.distributed.compressed_exchange import Compressed, bucket_shapes, compressed, compressible
from foretrace.techniques.distributed.compressors import METHODS, parts, rates, ratio, wanted
from foretrace.techniques.distributed.messages import ExchangePlan
from foretrace.training.compression.settings import CompressionSettings
from foretrace.training.training import Training

_HOOK = Prior(200.0, 50.0, 800.0, unit="µs", why="a hook in Python calls ten to a hundred operators")
_ON_CPU = Prior(
    0.5, 0.0, 1.0, unit="share", why="callbacks run on a thread of the back end; whether a core is free is not recorded"
)
_ON_DEVICE = Prior(1.0, 0.5, 1.0, unit="share", why="kernels of callbacks take multiprocessors from the backward pass")


@dataclass(frozen=True, kw_only=True)
class GradientCompression(Technique):
    """Communication hooks that compress gradients."""

    summary = "data-parallel workers exchange compressed gradients: fewer bytes, encoding and decoding"
    source = (
        "Agarwal et al., On the Utility of Gradient Compression (MLSys 2022); Vogels et al., PowerSGD (NeurIPS 2019); "
        "Lin et al., Deep Gradient Compression (ICLR 2018); Bernstein et al., signSGD (ICLR 2019); PyTorch, DDP hooks"
    )
    effort = "a communication hook; gradients change"
    needs = "data-parallel before it, and its processes"

    method: str = parameter(doc="how gradients are compressed", choices=METHODS)
    rank: int = parameter(4, doc="powersgd: columns of P and Q", least=1)
    min_rate: float = parameter(
        2.0, doc="powersgd: tensors that shrink by no more are sent as they are", unit="×", above=0
    )
    start: int = parameter(
        2, doc="powersgd: steps before it sets in; the prediction is for the steps after them", least=2,
        hint="DistributedDataParallel builds its buckets again after a step",
    )  # fmt: skip
    share: float = parameter(0.01, doc="topk, randomk, dgc: elements that are sent", unit="share", above=0, most=1)
    clip: float = parameter(0.0, doc="dgc: longest gradient of all workers together, by bucket; 0 is any", least=0)
    warm_steps: int = parameter(
        0, doc="dgc: steps with more elements; the prediction is for the steps after them", least=0
    )
    measured: float | None = derived(doc="time of the hook in a step relative to the hook timed alone")
    traffic: float | None = derived(doc="time of the hook on a GPU relative to what its passes over memory take")
    encode_gb_s: float | None = derived(unit="GB/s", doc="gradient bytes encoded per second")
    decode_gb_s: float | None = derived(unit="GB/s", doc="gradient bytes decoded per second")
    hook_us: float | None = derived(unit="µs", doc="time of a bucket beside what grows with its size")
    crowding: float | None = derived(unit="share", doc="part of the callbacks' time that the backward pass loses")

    @property
    def settings(self) -> CompressionSettings:
        """The method for the hooks."""
        names = ("method", "rank", "min_rate", "start", "share", "clip", "warm_steps")
        return CompressionSettings(**{name: getattr(self, name) for name in names})

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        plan = self._plan(graph)
        return wanted(self.settings, bucket_shapes(graph, plan), plan.workers, _device(graph))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        plan = self._plan(graph)
        found: dict[str, Prior] = {}
        if (known := self._known(graph, plan)) is not None:
            found[known.flag] = known.off
        else:
            encode, decode = rates(self.settings, plan.workers, cpu=graph.info.platform == "cpu")
            found |= {"encode_gb_s": encode, "decode_gb_s": decode, "hook_us": _HOOK}
        found["crowding"] = _ON_CPU if graph.info.platform == "cpu" else _ON_DEVICE
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        plan = self._plan(graph)
        shapes = bucket_shapes(graph, plan)
        values = self.values(graph)
        buckets = [
            Compressed(
                parts=[(part.kind, part.nbytes) for part in parts(self.settings, each, plan.workers) if part.nbytes],
                encode_s=encode,
                decode_s=decode,
            )
            for each, (encode, decode) in zip(shapes, self._times(graph, plan, values), strict=True)
        ]
        in_turn = self.method == "powersgd" and plan.backend == "gloo"
        changed = compressed(graph, plan, buckets, self, crowding=values["crowding"], in_turn=in_turn)
        every = [shape for each in shapes for shape in each]
        less = ratio(self.settings, every, plan.workers)
        coding = sum(each.encode_s + each.decode_s for each in buckets)
        what = (
            f"sent {1 / less:.3g} of the gradients' bytes ({less:.3g} times fewer), coding {1e3 * coding:.3g} ms a step"
        )
        return changed.noted(Change(what=what, tasks=len(buckets) * graph.n_steps))

    def coding_s(self, graph: TaskGraph) -> tuple[float, float, str]:
        """Return seconds of encoding and of decoding all buckets of a step, and how they are known (`coding`)."""
        plan = self._plan(graph)
        times, known = self._times(graph, plan, self.values(graph)), self._known(graph, plan)
        return sum(each for each, _ in times), sum(each for _, each in times), known.how if known else PRIOR

    def sent(self, graph: TaskGraph) -> tuple[float, float]:
        """Return bytes that a worker sends per step, and how many times fewer they are than its gradients."""
        plan = self._plan(graph)
        buckets = bucket_shapes(graph, plan)
        nbytes = sum(part.sent for each in buckets for part in parts(self.settings, each, plan.workers))
        return nbytes, sum(part.nbytes for part in plan.parts) / nbytes

    def realise(self, training: Training) -> Training:
        from foretrace.training.compression.hooks import Registered
        from foretrace.training.data_parallel import replicas

        parallel, settings = replicas(training, self.name), self.settings
        if self.method == "dgc":
            settings = replace(settings, momentum=_take_momentum(training))
        return replace(training, around_forward=(*training.around_forward, Registered(parallel, settings)))

    def _plan(self, graph: TaskGraph) -> ExchangePlan:
        plan = compressible(graph, self)
        if self.method == "powersgd" and plan.gradient_mb:
            raise self.refuse("the shapes of the gradients are unknown, and PowerSGD works on matrices.")
        return plan

    def _known(self, graph: TaskGraph, plan: ExchangePlan) -> Coding | None:
        """Return what coding every bucket takes, timed or by memory traffic; None where neither tells, or rates are
        given.
        """
        if self.encode_gb_s is not None or self.decode_gb_s is not None:
            return None
        shapes = bucket_shapes(graph, plan)
        found = timed(Calibration.of(graph), self.settings, shapes, plan.workers, _device(graph))
        name = graph.info.devices[0] if graph.info.devices and _device(graph) == "cuda" else ""
        device = find(name) or next((each for each in catalog() if each.name == name), None)  # recorded or estimated
        return found or (by_traffic(self.settings, shapes, plan.workers, device) if device else None)

    def _times(self, graph: TaskGraph, plan: ExchangePlan, values: dict[str, float]) -> list[tuple[float, float]]:
        if (known := self._known(graph, plan)) is not None:
            return [(values[known.flag] * encode, values[known.flag] * decode) for encode, decode in known.seconds]
        encode, decode, fixed = 1e9 * values["encode_gb_s"], 1e9 * values["decode_gb_s"], 0.5e-6 * values["hook_us"]
        return [(fixed + part.nbytes / encode, fixed + part.nbytes / decode) for part in plan.parts]


def _device(graph: TaskGraph) -> str:
    return "cpu" if graph.info.platform == "cpu" else "cuda"


def _take_momentum(training: Training) -> float:
    """Return momentum of SGD, which DGC applies on every worker before it sends, taken out of the optimizers;
    else 0.
    """
    from torch.optim import SGD

    taken = 0.0
    for optimizer in training.optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            taken, group["momentum"] = float(group["momentum"]) or taken, 0.0
    return taken
