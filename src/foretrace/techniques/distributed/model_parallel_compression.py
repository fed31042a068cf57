"""`model-parallel-compression`: activations compressed where workers that share a model exchange them.

Tensor-parallel workers add up two partial results per transformer layer in the forward pass (behind the attention's
output projection and the second product of the MLP); pipeline stages hand activations on and gradients back. Either is
in the recording, or its sizes are stated and it is put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.network.parse import network
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.edit import retime
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.model.messages import MIB
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import micro_batches, with_facts
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.boundary_messages import BoundaryMessages, boundary_messages
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.training.compression.settings import Boundary, kept
from foretrace.training.training import Training

METHODS = ("autoencoder", "topk", "randomk", "quantise", "none")
TENSOR, PIPELINE = "tensor", "pipeline"
_NAMES = {TENSOR: ("allreduce", "all_reduce", "all-reduce"), PIPELINE: ("send", "recv")}
_FLOAT = 4  # bytes
_PER_LAYER = 2  # forward all-reduces of a tensor-parallel layer
_MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelParallelCompression(Technique):
    """Compressed activations at tensor- or pipeline-parallel boundaries."""

    summary = "activations compressed between workers that share a model, in the last half of its layers"
    source = "Bian et al., Does Compressing Activations Help Model Parallel Training? (arXiv 2301.02654)"
    effort = "modules replaced; activations change"
    needs = "tensor-parallel processes, a model of TransformerEncoderLayers"

    method: str = parameter(doc="how activations are compressed", choices=METHODS)
    where: str = parameter(TENSOR, doc="between which workers", choices=(TENSOR, PIPELINE))
    depth: str = parameter("last-half", doc="which layers or boundaries", choices=("last-half", "all"))
    share: float = parameter(
        0.1, doc="autoencoder: code by hidden size; topk, randomk: elements sent", unit="share", above=0, most=1
    )
    bits: int = parameter(8, doc="quantise: 2, 4 or 8 bits per element")
    workers: int = parameter(2, doc="tensor-parallel processes, or pipeline stages", least=2)
    network: str = parameter("", doc="link between them, or a file; by default times shrink with the bytes")
    rows: int = parameter(0, doc="batch × sequence, where the recording shows no boundaries", least=0)
    hidden: int = parameter(0, doc="hidden size; of recorded boundaries, too", least=0)
    layers: int = parameter(
        0, doc="transformer layers, where the recording shows no boundaries", least=0, most=_MOST_LAYERS
    )
    measured: float | None = derived(doc="time of encoding and decoding in a step relative to timed alone")
    encode_gb_s: float | None = derived(unit="GB/s", doc="activation bytes encoded per second")
    decode_gb_s: float | None = derived(unit="GB/s", doc="activation bytes decoded per second")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    @property
    def boundary(self) -> Boundary:
        """The method for the modules."""
        return Boundary(method=self.method, share=self.share, bits=self.bits)

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        if self.method == "none" or graph.info.platform != "cpu":
            return ()
        return tuple(dict.fromkeys(each for size in self._sizes(graph) for each in self._codings(size)))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found: dict[str, Prior] = {}
        if self.method != "none":
            if self._timed(graph) is not None:
                found["measured"] = Prior(1.0, 0.8, 1.5, why="timed alone; in a step caches and memory are busier")
            else:
                cpu = graph.info.platform == "cpu"
                encode, decode = (_CPU if cpu else _GPU)[self.method]
                why = f"{'one core' if cpu else 'a data-centre GPU'} handles {self.method} so fast"
                for name, value in (("encode_gb_s", encode), ("decode_gb_s", decode)):
                    found[name] = Prior(value, value / 4, value * 4, unit="GB/s", why=why)
        if self.network:
            found["transfer"] = one_worker.transfer(network(self.network, self.workers), MIB)
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        rows = self._recorded(graph)
        return self._replaced(graph, rows) if len(rows) else self._put_in(graph)

    def _replaced(self, graph: TaskGraph, rows: Int64) -> TaskGraph:
        """Return recorded messages with compressed ones in their places, coding included: the step waits for either.

        What a message saves that nobody waited for is saved where the answer to it is waited for.
        """
        chosen = self._messages(graph).where(self._chosen(graph, rows))
        values = self.values(graph)
        scale = values.get("transfer", 1.0)
        net = network(self.network, self.workers) if self.network else None
        dur, left = graph.dur.astype(np.float64), 0.0
        for row, nbytes, link in zip(chosen.rows.tolist(), chosen.nbytes.tolist(), chosen.links.tolist(), strict=True):
            gradient = bool(graph.phase[row] == Phase.BACKWARD)
            kind, sent = self._sent(nbytes, gradient=gradient)
            plain = self._plain
            if net is None:  # as if bandwidth alone decided
                less = dur[row] * (1 - self._moved(kind, sent) / self._moved(plain, nbytes))
            else:
                less = 1e9 * scale * (net.cost(plain, nbytes).seconds - net.cost(kind, sent).seconds)
            dur[row] -= left + less
            left = -min(dur[row], 0.0) if self.where == PIPELINE else 0.0
            dur[row] = max(dur[row], 0.0) + 1e9 * self._beside_s(graph, nbytes, values, gradient=gradient)
            if link >= 0:
                dur[link] = min(dur[link], dur[row])
        changed = np.unique([*chosen.rows.tolist(), *(each for each in chosen.links.tolist() if each >= 0)])
        what = f"compressed the activations of {{}} ({self.method})"
        return retime(graph, graph.mask(changed), dur[changed], what=what)

    def _beside_s(self, graph: TaskGraph, nbytes: int, values: dict[str, float], *, gradient: bool) -> float:
        """Return seconds of coding at one message: sums of tensors with that of their backward pass."""
        encode, decode = self._coding_s(graph, nbytes, values)
        back = {"autoencoder": 2 * (encode + decode), "quantise": encode + decode}.get(self.method, decode)
        if self.where == PIPELINE:
            return back if gradient else encode + decode
        return encode + decode + (0.0 if self.method == "quantise" else back)  # whose gradient passes straight through

    def _put_in(self, graph: TaskGraph) -> TaskGraph:
        """Return messages of stated sizes at equal distances in the forward pass, of pipelines in the backward pass,
        too.
        """
        if not (self.rows and self.hidden and self.layers and self.network):
            raise self.refuse(
                f"the recording shows no {self.where}-parallel exchange of activations; record one worker of such a "
                "run, or state what it would exchange: rows=(batch × sequence) hidden= layers= network=."
            )
        if graph.info.recording.get("distributed"):
            raise self.refuse("other workers exchange messages in this graph already; both at once are not predicted.")
        if micro_batches(graph) > 1:
            raise self.refuse("every micro-batch exchanges activations; put gradient-accumulation behind it.")
        values, net = self.values(graph), network(self.network, self.workers)
        count = _PER_LAYER * self.layers if self.where == TENSOR else 1
        nbytes = _FLOAT * self.rows * self.hidden
        messages: list[Message] = []
        stops: list[Stop] = []
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            places = _places(graph, phase, count)
            if places is None:
                raise self.refuse(f"the recording shows no {phase.name.lower()} pass of {count} tasks or more.")
            for i, host in enumerate(places):
                late = i >= count // 2 if phase == Phase.FORWARD else i < (count + 1) // 2
                compress = (self.depth == "all" or late or count == 1) and self.method != "none"
                compress &= phase == Phase.FORWARD or self.where == PIPELINE  # Megatron's f stays as it is
                kind, sent = self._sent(nbytes) if compress else (self._plain, float(nbytes))
                encode, decode = self._coding_s(graph, nbytes, values) if compress else (0.0, 0.0)
                wire = net.cost(kind, sent).seconds * values.get("transfer", 1.0)
                dur = round(1e9 * (wire + encode + decode))
                messages.append(
                    Message(
                        name=f"{'compressed ' * compress}{kind} of activations",
                        nbytes=round(sent),
                        dur_ns=dur,
                        wire_ns=dur,
                        after=host,
                        waits=host,
                    )
                )
                if not any(np.array_equal(stop.waits, host) for stop in stops):
                    stops.append(Stop(waits=host))
        result = exchange(graph, messages, stops, in_flight=1)
        note = (
            f"{self.where}-parallel exchanges of {nbytes / 1e6:.4g} MB as stated, {len(messages)} a step; the "
            "recording is taken to be the computing of one of the workers"
        )
        change = Change(what=note, tasks=len(messages) * graph.n_steps)
        return with_facts(result.noted(change), distributed={"model_parallel": str(self), "workers": self.workers})

    def _messages(self, graph: TaskGraph) -> BoundaryMessages:
        return boundary_messages(graph, _NAMES[self.where])

    def _recorded(self, graph: TaskGraph) -> Int64:
        """Return rows of the recorded messages of this kind."""
        rows = self._messages(graph).rows
        return rows[graph.phase[rows] == Phase.FORWARD] if self.where == TENSOR else rows

    def _chosen(self, graph: TaskGraph, rows: Int64) -> Int64:
        """Return those in the depth: the last half of a forward pass. A pipeline stage has one boundary."""
        if self.depth == "all" or self.where == PIPELINE:
            return rows
        found: list[int] = []
        for step in np.unique(graph.step[rows]).tolist():
            mine = rows[graph.step[rows] == step]
            found += mine[len(mine) // 2 :].tolist()
        return np.array(sorted(found), dtype=np.int64)

    def _sizes(self, graph: TaskGraph) -> tuple[int, ...]:
        """Return bytes of the activations that are exchanged."""
        rows = self._recorded(graph)
        if len(rows):
            return tuple(sorted(set(self._messages(graph).where(self._chosen(graph, rows)).nbytes.tolist())))
        return (_FLOAT * self.rows * self.hidden,) if self.rows and self.hidden else ()

    @property
    def _plain(self) -> CollectiveKind:
        """What sends an activation as it is."""
        return CollectiveKind.ALL_REDUCE if self.where == TENSOR else CollectiveKind.SEND

    def _sent(self, nbytes: float, *, gradient: bool = False) -> tuple[CollectiveKind, float]:
        """Return the message of a compressed activation, its bytes as `cost.network` counts them; or of the gradient
        that a pipeline sends back.
        """
        elements = round(nbytes / _FLOAT)
        chosen = kept(elements, self.share)
        tensor, plain = self.where == TENSOR, self._plain
        gathered = CollectiveKind.ALL_GATHER if tensor else CollectiveKind.SEND
        gather = self.workers if tensor else 1  # an all-gather counts the bytes of all workers together
        match self.method:
            case "autoencoder":
                hidden = self.hidden or elements
                return plain, nbytes * kept(hidden, self.share) / hidden
            case "topk":
                return gathered, (1.0 if gradient else 2.0) * _FLOAT * chosen * gather  # where is known by then
            case "randomk":
                return plain, float(_FLOAT * chosen)
            case "quantise":
                return gathered, (elements * self.bits / 8 + 2 * _FLOAT) * gather
        return plain, nbytes

    def _moved(self, kind: CollectiveKind, nbytes: float) -> float:
        """Return bytes that cross a link of a ring."""
        part = (self.workers - 1) / self.workers
        return nbytes * {CollectiveKind.ALL_REDUCE: 2 * part, CollectiveKind.ALL_GATHER: part}.get(kind, 1.0)

    def _codings(self, nbytes: int) -> tuple[Operator, Operator]:
        from foretrace.training.compression.timing import coding_operators

        hidden = self.hidden or 1024
        answers = self.workers if self.where == TENSOR and self.method in ("topk", "quantise") else 1
        return coding_operators(self.boundary, max(nbytes // _FLOAT // hidden, 1), hidden, answers)

    def _timed(self, graph: TaskGraph) -> Calibration | None:
        """Return the calibration of a graph, if it holds all codings."""
        if self.encode_gb_s is not None or self.decode_gb_s is not None or graph.info.platform != "cpu":
            return None
        found = Calibration.of(graph)
        wanted = self.wants(graph)
        return found if wanted and all(found.time_s(each) is not None for each in wanted) else None

    def _coding_s(self, graph: TaskGraph, nbytes: int, values: dict[str, float]) -> tuple[float, float]:
        """Return seconds of encoding and decoding one activation."""
        if self.method == "none":
            return 0.0, 0.0
        calibration = self._timed(graph)
        if calibration is not None:
            encode, decode = (calibration.time_s(each) or 0.0 for each in self._codings(nbytes))
            return values["measured"] * encode, values["measured"] * decode
        return nbytes / (1e9 * values["encode_gb_s"]), nbytes / (1e9 * values["decode_gb_s"])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4, 8):
            raise self.refuse(f"bits={self.bits} is not offered; give 2, 4 or 8.")

    def realise(self, training: Training) -> Training:
        from foretrace.training.compression.boundaries import divided
        from foretrace.training.data_parallel import need_group

        if self.where == PIPELINE:
            raise self.refuse(
                "no pipeline is built out of a training; its boundaries are Sender and Receiver of "
                "foretrace.training.compression.boundaries."
            )
        need_group(self.name, self.workers)
        return divided(training, self.boundary, self.workers, all_layers=self.depth == "all", name=self.name)


def _places(graph: TaskGraph, phase: Phase, count: int) -> Sequence[Int64] | None:
    """Return host rows (one per step) at equal shares of the time of a phase; None where a step has fewer tasks."""
    found = np.zeros((count, graph.n_steps), dtype=np.int64)
    for step in range(graph.n_steps):
        rows = np.flatnonzero((graph.phase == phase) & (graph.step == step) & ~graph.on_device & ~graph.gone)
        if phase == Phase.FORWARD:  # what counts as forward but comes behind the backward pass is no layer's work
            later = np.flatnonzero((graph.phase == Phase.BACKWARD) & (graph.step == step) & ~graph.gone)
            rows = rows[graph.recorded[rows] < graph.recorded[later].min(initial=np.iinfo(np.int64).max)]
        rows = rows[np.isin(graph.kind[rows], (TaskKind.CPU, TaskKind.OPERATOR, TaskKind.PYTHON, TaskKind.CALL))]
        if not len(rows):
            return None
        lanes, times = np.unique(graph.lane[rows]), graph.dur[rows]
        busiest = max(lanes.tolist(), key=lambda lane: int(times[graph.lane[rows] == lane].sum()))
        rows = rows[graph.lane[rows] == busiest]
        done = np.cumsum(graph.dur[rows])
        shift = 0.0 if phase == Phase.FORWARD else 0.5  # behind a layer's work; ahead of its half
        at = (np.arange(1, count + 1) - shift) / (count + 0.5 - shift) * done[-1]
        if len(rows) < count:
            return None
        place = np.searchsorted(done, at)
        for i in range(count):  # every message waits for the one before it, so each needs a place of its own
            place[i] = min(max(place[i], place[i - 1] + 1 if i else 0), len(rows) - count + i)
        found[:, step] = rows[place]
    return list(found)


# GB/s of float32 activations. CPU: `make reproduce NAME=compression_utility`. GPU: no measurement, the range is wide.
_CPU = {"autoencoder": (0.4, 0.4), "topk": (0.2, 3.0), "randomk": (0.15, 0.15), "quantise": (0.6, 0.8)}
_GPU = {"autoencoder": (100.0, 100.0), "topk": (1.0, 20.0), "randomk": (2.0, 20.0), "quantise": (50.0, 50.0)}
