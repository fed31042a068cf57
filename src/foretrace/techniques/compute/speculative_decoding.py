"""`speculative-decoding`: a small draft proposes k tokens, the target verifies them in one pass.

A recorded step is one token of every sequence. A round is k passes of the draft and one of the target over k + 1
tokens, and emits tau tokens; so a step becomes 1 / tau of a round: the recorded work times `verify` / tau, and the
draft's share in front of it. The host's work goes with the k + 1 tokens of a round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.graph import edit
from foretrace.graph.insert import DeviceTask, HostTask, insert
from foretrace.graph.select import select
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.compute.acceptance import Acceptance, checked_k

_TIME = re.compile(r"(\d*\.?\d+) ?(us|µs|ms|s)")
_SHAPE = re.compile(r"(\d{1,4})x(\d{1,6})")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_ON_PROCESSOR, _ON_DEVICE = (0.02, 0.07, 0.2), (0.0, 0.01, 0.05)  # of a pass, for each token more: low, middle, high

_LEAST = 0.2  # of a recorded pass: the noise of few steps may reach below 0


@dataclass(frozen=True, kw_only=True)
class SpeculativeDecoding(Technique):
    """Let a draft propose tokens that the recorded model verifies."""

    summary = "a small draft proposes tokens, the recorded model verifies several in one pass"
    source = "Leviathan et al., ICML 2023, section 3; Yan et al., Decoding Speculative Decoding, 2024, section 3"
    effort = "a draft with the target's vocabulary, and an engine that verifies"
    not_applied = "it changes how an engine decodes, which is no training; engines take a draft as an option of theirs."

    draft: str = parameter(
        doc="time of one of its passes (0.8ms), a recording of its decoding, or layers x width (2x512)"
    )
    k: int = parameter(4, doc="tokens that it proposes in a round")
    acceptance: str = parameter(
        "0.7", doc="share of proposals that are accepted: a rate, a range 0.6-0.8, or rounds that accepted 0/1/2/..."
    )
    pass_ms: float | None = derived(unit="ms", doc="one pass of the draft")
    tokens: float | None = derived(unit="tokens", doc="tokens that a round emits", larger_is="faster")
    verify: float | None = derived(doc="pass of the target over k + 1 tokens, relative to one token")
    host: float | None = prior(
        0.035, 0.005, 0.08, unit="passes",
        doc="host work of each of the k + 1 tokens of a round: drawing, accepting, in passes of the target",
        why="Python and PyTorch with a decoder of 8 layers: 0.025 a round and 0.06 a proposal; engines hide a part",
    )  # fmt: skip

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        self._check(graph)
        found = dict(super().priors(graph))
        found["pass_ms"] = self._pass_ms(graph)
        found["tokens"] = Acceptance.of(self.acceptance).tokens(self.k)
        device = bool(graph.on_device.any())
        low, middle, high = _ON_DEVICE if device else _ON_PROCESSOR
        found["verify"] = Prior(
            1 + middle * self.k, 1 + low * self.k, 1 + high * self.k,
            why="weights are read once for all tokens until arithmetic takes longer" if device else
            "on processors a token more took 2 to 20 % of a pass more, by width",
        )  # fmt: skip
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        self._check(graph)
        for name in ("pass_ms", "verify"):
            if getattr(self, name) == 0:
                raise self.refuse(f"{name} must be above 0, got 0; or leave it out.")
        values = self.values(graph)
        step_ns, tau = _step_ns(graph), values["tokens"]
        if not 1 <= tau <= self.k + 1:
            raise self.refuse(f"tokens={tau:g} must be from 1 to k + 1 = {self.k + 1}; a round emits no other number.")
        if values["pass_ms"] * 1e6 >= step_ns:
            raise self.refuse(
                f"a pass of the draft ({values['pass_ms']:.3g} ms) takes as long as one of the recorded model "
                f"({step_ns / 1e6:.3g} ms); choose a smaller draft."
            )
        drafted = round((self.k * values["pass_ms"] * 1e6 + (self.k + 1) * values["host"] * step_ns) / tau)
        mask = ~graph.gone & (graph.dur > 0)
        changed = edit.retime(
            graph, mask, graph.dur[mask].astype(np.float64) * (values["verify"] / tau),
            what=f"let {{}} verify {self.k + 1} tokens for every {tau:.3g} that come out",
        )  # fmt: skip
        new: list[HostTask | DeviceTask] = []
        for step in range(graph.n_steps):
            host = _first(graph, step, on_device=False)
            device = _first(graph, step, on_device=True)
            if host is None:
                raise self.refuse("a step has no work of the host, so nothing can be put in front of it.")
            if device is not None:
                new.append(DeviceTask(after=device, launched_after=host, name="draft", dur_ns=drafted))
            new.append(HostTask(after=host, name="draft", dur_ns=drafted))
        return insert(changed, new)

    def _check(self, graph: TaskGraph) -> None:
        """Refuse what cannot be."""
        try:
            checked_k(self.k)
            Acceptance.of(self.acceptance)
        except ForetraceError as error:
            raise self.refuse(str(error)) from error
        if select(graph, phase=(Phase.BACKWARD, Phase.OPTIMIZER)).any():
            raise self.refuse("the recording trains; record decoding, one token of every sequence per step.")
        if not graph.n_steps or _step_ns(graph) <= 0:
            raise self.refuse("no whole step was recorded.")

    def _pass_ms(self, graph: TaskGraph) -> Prior:
        """Return one pass of the draft."""
        if given := _TIME.fullmatch(self.draft):
            value = float(given[1]) * _SECONDS[given[2]] * 1e3
            if not (isfinite(value) and value > 0):
                raise self.refuse(f"draft={self.draft} must be a time above 0; write it as 0.8ms.")
            return Prior(value, value, value, unit="ms", why="given")
        if shape := _SHAPE.fullmatch(self.draft):
            return self._like(graph, int(shape[1]), int(shape[2]))
        if not Path(self.draft).exists():
            raise self.refuse(
                f"draft={self.draft} must be a time (0.8ms), layers x width (2x512) or a recording; there is none."
            )
        return _recorded(self.draft)

    def _like(self, graph: TaskGraph, layers: int, width: int) -> Prior:
        """Return a draft of the target's kind: time goes with layers, and with width between not at all and its
        square.
        """
        own, own_width, share = _layers(graph)
        if not own or not own_width:
            raise self.refuse(
                "the recording does not tell layers and width of its model; record modules, or give the draft's time."
            )
        if not layers or not width or layers * width**2 >= own * own_width**2:
            raise self.refuse(
                f"a draft of {layers} x {width} is not smaller than the recorded model of {own} x {own_width}; "
                "choose fewer layers or a smaller width."
            )
        step_ms = _step_ns(graph) / 1e6
        grown, part = (width / own_width) ** 2, layers / own
        low = min(grown, 1.0) * part * step_ms
        high = max(grown, 1.0) * (1 - share + share * part) * step_ms
        return Prior(
            (low * high) ** 0.5, low, high, unit="ms",
            why="from all of a pass going with layers and with width squared, to the recorded layers alone",
        )  # fmt: skip


def _step_ns(graph: TaskGraph) -> float:
    return simulate(graph).step_time_s * 1e9


def _first(graph: TaskGraph, step: int, *, on_device: bool) -> int | None:
    """Return the first task of a step on its thread, or on the busiest stream."""
    rows = np.flatnonzero((graph.step == step) & (graph.on_device == on_device) & ~graph.gone)
    rows = rows[~np.isin(graph.kind[rows], (TaskKind.MARK, TaskKind.RETURN))]
    if not len(rows):
        return None
    lane = np.bincount(graph.lane[rows], weights=graph.dur[rows]).argmax()
    return int(rows[graph.lane[rows] == lane][0])


@lru_cache(maxsize=16)
def _recorded(path: str) -> Prior:
    """Return the median step of a recording, with the range of its steps."""
    from foretrace.graph.builder import build
    from foretrace.simulate.overhead import unprofiled
    from foretrace.trace.read import read

    line = simulate(unprofiled(build(read(Path(path)), None)))
    noise = line.noise_s(0.8)
    value = 1e3 * line.step_time_s
    low = max(1e3 * noise.low_s, _LEAST * value)
    return Prior(value, low, max(1e3 * noise.high_s, value), unit="ms", why=f"recorded in {path}")


def _layers(graph: TaskGraph) -> tuple[int, int, float]:
    """Return layers, width, and the share of the recorded work that is in layers; zeros where the recording does not
    tell.

    Layers are the modules that stand most often under one name with a number behind it.
    """
    parts = [[re.fullmatch(r"(.*?)[_.]?(\d+)", each) for each in name.split(".")] for name in graph.layers]

    def kinds(depth: int) -> dict[str, set[str]]:
        """Return numbers by name; below the first level only of modules that hold others."""
        found: dict[str, set[str]] = {}
        for each in parts:
            if len(each) > depth + (depth > 1) and (named := each[depth]) is not None:
                found.setdefault(named[1], set()).add(named[2])
        return found

    # Models stand in others: LlamaForCausalLM_0.LlamaModel_0.LlamaDecoderLayer_0.
    at = next((depth for depth in (1, 2, 3) if max(map(len, kinds(depth).values()), default=0) > 1), 1)
    if not kinds(at):
        return 0, 0, 0.0
    name, numbers = max(kinds(at).items(), key=lambda each: len(each[1]))
    own = [len(each) > at and (named := each[at]) is not None and named[1] == name for each in parts]
    inside = np.array([*own, False])
    busy = np.where(graph.gone, 0, graph.dur).astype(float)
    tables = [each["shape"] for each in graph.info.recording.get("parameters", []) if len(each["shape"]) == 2]
    width = min((min(each) for each in tables), default=0)
    return len(numbers), int(width), float(busy[inside[graph.layer]].sum() / max(busy.sum(), 1.0))
