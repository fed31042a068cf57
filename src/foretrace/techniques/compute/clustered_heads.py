"""`clustered-heads`: heads of a decoder that share attention scores, so that keys and their products shrink.

While a decoder decodes, each layer reads the keys and values of all tokens once for every new one. Where k of H heads
compute scores for all, k / H of the keys are kept and read, and all of the values. Gathering scores and more, smaller
operators cost something, so that a short context or a large k gains nothing: which case holds is predicted from both
forms of the step timed alone, or from bytes with a wide range.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph.edit import retime
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, parameter, prior
from foretrace.training.training import Training

_TIMED = "foretrace.training.clustered_heads:prepared_attention"
_ATTENTION, _CAT = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::cat"
_EIGHTHS = 3  # binary digits of a context beyond the first: those within an eighth of each other are timed as one


@dataclass(frozen=True, kw_only=True)
class ClusteredHeads(Technique):
    """Cluster the heads of a decoder, per request and layer; one head of each cluster computes scores for all."""

    across = "each"
    summary = "heads of a decoder share attention scores: fewer keys are kept and read"
    source = "Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference, ICML 2024, section 3"
    effort = "counts to choose per layer; other scores, accuracy to check"

    clusters: str = parameter(doc="clusters of heads in every layer, or of each layer: 8,4,2,2")
    warm_up: int = parameter(16, doc="first tokens of a request that all heads attend", unit="tokens", least=1)
    by: str = parameter(
        "scores", doc="how heads are clustered; random is what scores have to beat", choices=("scores", "random")
    )
    measured: float | None = prior(
        1.0, 0.85, 1.2, doc="attention with clusters in a step relative to what it takes timed alone",
        why="alone, queries and new keys come from a cache, and the allocator has other blocks to give",
    )  # fmt: skip
    efficiency: float | None = prior(
        1.0, 0.75, 1.35, doc="attention with clusters relative to its share of the bytes read",
        why="scores are kept and gathered, and products are smaller; foretrace calibrate run times it",
    )  # fmt: skip
    more_us: float | None = prior(
        40.0, 15.0, 120.0, unit="µs", doc="host time of the operators that sharing adds, per layer and token",
        why="about ten small operators where there was one; foretrace calibrate run times them",
    )  # fmt: skip

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        with suppress(NotApplicableError):
            return tuple(dict.fromkeys(each.timed(k) for each in self._calls(graph) for k in (0, each.clusters)))
        return ()

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found, known = dict(super().priors(graph)), {False}
        with suppress(NotApplicableError):
            known = {self._seconds(graph, each) is not None for each in self._calls(graph)}
        if False not in known:
            del found["efficiency"], found["more_us"]
        elif True not in known:
            del found["measured"]
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        found, values = self._calls(graph), self.values(graph)
        dur = graph.dur.astype(np.float64)
        for call in found:
            kept, timed = call.clusters / call.heads, self._seconds(graph, call)
            if timed is not None:
                more_ns = 1e9 * (timed[1] * values["measured"] - timed[0])
            else:  # all values are read, and of the keys those kept; these alone are copied into a longer cache
                more_ns = dur[call.row] * ((1 + kept) / 2 * values["efficiency"] - 1) + 1e3 * values["more_us"]
                more_ns -= sum(dur[row] * (1 - kept) for row in call.copies[:1])
            for row in call.rows:  # what attention has not to give, copies give
                taken = max(more_ns, -dur[row])
                dur[row] += taken
                more_ns -= taken
        mask = graph.mask(np.array([row for call in found for row in call.rows], dtype=np.int64))
        kept = float(np.mean([call.clusters / call.heads for call in found]))
        return retime(graph, mask, dur[mask], what=f"shared scores in {{}}, with {100 * kept:.0f} % of their keys left")

    def realise(self, training: Training) -> Training:
        from foretrace.training.clustered_heads import cluster_heads, heads_of

        model: Any = training.model
        heads_of(model)
        layers = int(model.config.num_hidden_layers)
        counts = self._counts()
        if len(counts) not in (1, layers):
            raise self.refuse(f"clusters={self.clusters} is for {len(counts)} layers and the model has {layers}.")
        counts = counts if len(counts) == layers else counts * layers
        cluster_heads(model, counts, warm_up=self.warm_up, by=self.by)
        return training

    def _counts(self) -> list[int]:
        words = self.clusters.split(",")
        if not all(word.strip().isdigit() and int(word) for word in words):
            raise self.refuse(f"clusters={self.clusters} must be whole numbers above 0; write 4, or 8,4,2,2.")
        return [int(word) for word in words]

    def _calls(self, graph: TaskGraph) -> list[DecodedAttention]:
        """Return attention of the layers whose heads are clustered; refuses where the recording shows none."""
        counts, found = self._counts(), attentions(graph)
        if graph.on_device.any():
            raise self.refuse("one fused kernel becomes several, whose times are known on processors alone.")
        if not found:
            raise self.refuse(
                "the recording shows no fused attention of a processor, or not its shapes; record with them."
            )
        if any(each.queries != 1 for each in found):
            raise self.refuse(
                "the recording shows attention of many tokens at once; record decoding, a token per step."
            )
        if few := [each for each in found if each.heads != each.keys]:
            raise self.refuse(
                f"{few[0].heads} query heads share {few[0].keys} key heads already (grouped-query attention); no key "
                "could be dropped while a query of its group needs it."
            )
        if most := [each for each in found if max(counts) > each.heads]:
            raise self.refuse(f"clusters={self.clusters} is more than {most[0].heads} heads; give at most as many.")
        if found[0].heads == 1:
            raise self.refuse("the model has one head per layer, which has nobody to share scores with.")
        steps = [(int(graph.lane[each.row]), int(graph.step[each.row])) for each in found]
        layers = len({int(graph.layer[each.row]) for each in found})
        if layers == 1:  # modules were not recorded
            layers = max(Counter(steps).values())
        if len(counts) not in (1, layers):
            raise self.refuse(f"clusters={self.clusters} is for {len(counts)} layers and the model has {layers}.")
        before, chosen = Counter[tuple[int, int]](), list[DecodedAttention]()
        for each, step in zip(found, steps, strict=True):
            chosen.append(replace(each, clusters=counts[before[step] % len(counts)]))
            before[step] += 1
        if all(each.tokens <= self.warm_up for each in chosen):
            raise self.refuse(f"all contexts lie within the warm-up of {self.warm_up} tokens, which all heads attend.")
        chosen = [each for each in chosen if each.clusters < each.heads and each.tokens > self.warm_up]
        if not chosen:
            raise self.refuse(f"clusters={self.clusters} is as many as there are heads, and changes nothing.")
        return chosen

    def _seconds(self, graph: TaskGraph, call: DecodedAttention) -> tuple[float, float] | None:
        """Return attention and cache of one layer with all heads and with clusters, timed alone at about this
        context.
        """
        own_s = sum(int(graph.dur[row]) for row in call.rows) / 1e9
        timed = Calibration.of(graph).times_s(call.timed(0), call.timed(call.clusters), own_s)
        by = call.tokens / call.rounded
        return None if timed is None else (timed[0] * by, timed[1] * by)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedAttention:
    """One call of attention in a recording, and the copies of keys and values into a longer cache before it."""

    row: int
    copies: tuple[int, ...]  # keys, values; none where the cache is of another kind
    batch: int
    heads: int  # of queries
    keys: int  # heads of keys
    queries: int
    tokens: int
    width: int
    type: str
    clusters: int = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """All tasks."""
        return (self.row, *self.copies)

    @property
    def rounded(self) -> int:
        """The context at which it is timed alone."""
        unit = 1 << max(self.tokens.bit_length() - 1 - _EIGHTHS, 0)
        return max(round(self.tokens / unit) * unit, 2)

    def timed(self, clusters: int) -> Operator:
        """Return the call with clusters, 0 for all heads, to be timed alone."""
        shape = [self.batch, self.heads, 1, self.width]
        cached = [self.batch, self.heads, self.rounded, self.width]
        return Operator.of(_TIMED, [shape, cached, []], [self.type, self.type, ""], ["", "", str(clusters)])


def attentions(graph: TaskGraph) -> list[DecodedAttention]:
    """Return all calls of fused attention on processors, in program order."""
    names = {name: i for i, name in enumerate(graph.names)}
    wanted = [names[each] for each in (_ATTENTION, _CAT) if each in names]
    found, copies = [], dict[int, list[tuple[int, list[int]]]]()
    for row in np.flatnonzero(np.isin(graph.op, wanted) & ~graph.gone & (graph.shape >= 0)).tolist():
        operator = Operator(graph.names[graph.op[row]], graph.shapes[graph.shape[row]])
        before = copies.setdefault(int(graph.lane[row]), [])
        if operator.name == _CAT:
            parts = operator.dims[0] if operator.dims else []
            if len(parts) == 2 and all(isinstance(part, list) and len(part) == 4 for part in parts):
                before.append((row, [*parts[0][:2], parts[0][2] + parts[1][2], parts[0][3]]))
            continue
        query, key = operator.tensor(0), operator.tensor(1)
        if len(query) == len(key) == 4 and min(*query, *key) > 0:
            mine = [at for at, made in before if made == list(key)]
            found.append(
                DecodedAttention(
                    row=row, copies=tuple(mine[-2:]) if len(mine) > 1 else (), batch=query[0], heads=query[1],
                    keys=key[1], queries=query[2], tokens=key[2], width=query[3], type=operator.type(0),
                )
            )  # fmt: skip
        before.clear()
    return found
