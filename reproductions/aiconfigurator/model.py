"""TTFT and TPOT of measured servers by the law of a step and a closed loop: what is fitted, and to which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.hardware.devices import named
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.operator_tables import OperatorTables
from foretrace.serving.llm.pace import along
from foretrace.serving.llm.served_model import served_model
from foretrace.serving.llm.step_law import (
    Layout,
    StepLaw,
    cache_bytes,
    decode_per_token,
    linear_seconds,
    number_format,
    output_seconds,
    prefill_per_pair,
)
from reproductions.aiconfigurator.closed_loop import LoopTable, mean_times, play
from reproductions.aiconfigurator.sample import SYSTEMS, Measured

WAVES = 10  # prompts for each client, by the public recipes
PLAYED = 4  # waves that are played: the first is one of ten, the others stand for the rest
LEAST = 24
TOKENS = np.unique(np.round(np.geomspace(1, 65536, 34)))
SEQUENCES = np.unique(np.round(np.geomspace(1, 8192, 20)))
UTILISATION = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the public recipes start an engine with: InferenceX, benchmarks/single_node, 2026."""

    budget: int
    mixed: bool
    poll: int = 1
    most: int = 1024
    gather: int = 1
    wait: int = 0


def recipe(one: Measured) -> Recipe:
    """The settings of this row's engine by its recipe."""
    if one.engine == "sglang":
        few = one.clients < 16 or (one.group == ("qwen3.5-397b-a17b", "b300_sxm") and one.dtype == "fp8")
        poll = 1 if one.architecture == "glm-5" else 10 if few else 30
        return Recipe(budget=16384 if one.dtype == "fp4" else 32768, mixed=False, poll=poll, most=256)
    if one.engine == "vllm":
        return Recipe(budget=max(2 * one.prompt, 2048) if one.system != "h100_sxm" else 8192, mixed=True)
    budget, groups = max(8192, one.clients + one.prompt + 64), one.layout.dp
    if groups > 1:
        return Recipe(budget=budget * groups, mixed=True, gather=groups, wait=60)
    if one.dtype == "fp8" and one.clients >= 64 and one.prompt == one.output == 1024:
        return Recipe(budget=budget, mixed=True, gather=int(0.8 * budget / one.prompt), wait=40)
    return Recipe(budget=budget, mixed=True)


def lengths(one: Measured, waves: int = PLAYED) -> tuple[Int64, Int64, int]:
    """Prompts and outputs of the requests that are played, and how many clients send them."""
    clients = one.clients
    count = max(waves * clients, LEAST)
    random = np.random.default_rng(0)
    low, high = (0.9, 1.1) if one.harness == "other" else (0.8, 1.0)
    prompts = np.round(one.prompt * random.uniform(low, high, count)).astype(np.int64)
    outputs = np.round(one.output * random.uniform(low, high, count)).astype(np.int64)
    return prompts, outputs, clients


def capacity(one: Measured, layout: Layout) -> float:
    """Tokens that one engine caches."""
    model, kept, device = served_model(one.architecture), number_format(one.dtype), named(SYSTEMS[one.system])
    experts = model.moe_layers * model.experts * model.expert_parameters * kept.experts / layout.devices
    dense = (model.dense * model.dense_parameters + model.moe_layers * model.shared_parameters) * kept.dense
    rest = model.layers * model.attention_parameters * kept.attention + 4 * model.words * model.hidden
    weights = experts + dense / layout.devices + rest / layout.tp
    free = device.memory_gb * 2**30 * UTILISATION - weights
    return max(free, 1e9) / cache_bytes(model, layout, kept) * layout.dp


def tabled(one: Measured, layout: Layout, law: StepLaw) -> LoopTable:
    """Times of a step of this row's engine."""
    model, kept, device = served_model(one.architecture), number_format(one.dtype), named(SYSTEMS[one.system])
    return LoopTable(
        TOKENS, linear_seconds(model, device, layout, kept, law, TOKENS),
        SEQUENCES, output_seconds(model, device, layout, law, SEQUENCES),
        decode_per_token(model, device, layout, kept, law), prefill_per_pair(model, device, layout, law),
        law.host_s, law.host_per_sequence_s,
    )  # fmt: skip


ENGINES = ("vllm", "sglang", "trtllm")


# What is fitted: the law of a step, some of it for each engine, and what a client waits for beside steps.
def measured_operators(one: Measured, law: StepLaw, tables: OperatorTables) -> LoopTable:
    """Times of a step from measured operators, attention at this row's batch and mean context."""
    steps = step_times(one.architecture, SYSTEMS[one.system], tp=one.layout.tp, dp=one.layout.dp, ep=one.layout.ep,
                       dtype=one.dtype, engine=one.engine, tables=tables, law=law)  # fmt: skip
    batch, context = float(one.clients), one.prompt + one.output / 2
    decode = along(
        steps.mean_context, np.array([along(steps.batch, each, batch) for each in steps.decode_s.T]), context
    )
    pairs = along(steps.chunk, np.ascontiguousarray(steps.prefill_s[:, 0]), float(one.prompt)) / (one.prompt**2 / 2)
    return LoopTable(steps.tokens, steps.linear_s, steps.sequences, steps.output_s, decode / (batch * context), pairs,
                     law.host_s, law.host_per_sequence_s)  # fmt: skip


# What is fitted: the law of a step, some of it for each engine, and what else a client waits for.
NAMES = tuple(each.name for each in fields(StepLaw) if not each.name.endswith(("engine", "low", "high")))
PER_ENGINE = ("kernel_s", "host_s", "host_per_sequence_s", "request_s", "expert_rate", "collective_s")
_CLIENT = {
    "other_request_s": 50e-3,  # `request_s` of the other harness
    "front_s": 1e-3,  # of each request, in the process in front of the engine
    "front_per_token_s": 1e-6,
    "cold_s": 1.0,  # mean over all requests of what the first ones of an engine that was not warm wait
}
COLUMNS = (
    *((name, engine) for name in NAMES for engine in (ENGINES if name in PER_ENGINE else ("",))),
    *((name, "") for name in _CLIENT),
)
DEFAULTS = np.log([_CLIENT[name] if name in _CLIENT else getattr(StepLaw(), name) for name, _ in COLUMNS])
# How far a number may be from where it starts, in logarithms: rates are shares of peaks, latencies are less known.
_SPREAD = np.array([0.2 if name.endswith(("_rate", "_flops", "_fp4")) else 1.0 for name, _ in COLUMNS])
_ADDED = ("request_s", "other_request_s", "cold_s")  # they change no step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The law of each engine, and the other numbers of `COLUMNS`."""

    laws: Mapping[str, StepLaw]
    client: Mapping[str, float]

    def waits_s(self, one: Measured) -> float:
        """What a request of this row waits beside the engine's steps."""
        cold = self.client["cold_s"] if one.harness == "cold" else 0.0
        return cold + (self.client["other_request_s"] if one.harness == "other" else self.laws[one.engine].request_s)


def of_logs(logs: Float64) -> Fit:
    """The fit whose numbers have these logarithms, in the order of COLUMNS."""
    values = dict(zip(COLUMNS, np.exp(logs).tolist(), strict=True))
    laws = {
        engine: StepLaw(engine=engine, **{name: values[name, engine if name in PER_ENGINE else ""] for name in NAMES})
        for engine in ENGINES
    }
    return Fit(laws=laws, client={name: values[name, ""] for name in _CLIENT})


class Predicted:
    """Rows and what was measured of them, to be predicted again and again."""

    scales = np.array([0.15, 0.3])  # errors of logarithms of TPOT and TTFT from which on they count linearly

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.rows = tuple(rows)
        self.measured = np.log([[one.tpot_s, one.ttft_s] for one in rows])

    def predict(self, found: Fit, only: str = "", known: Float64 | None = None) -> Float64:
        """(n, 2) logarithms of TPOT and TTFT. `known`: an answer, of which rows of engine `only` are renewed."""
        raise NotImplementedError

    def slopes(self, logs: Float64, at: Float64, step: float = 1e-3) -> Float64:
        """(n, 2, columns) derivatives of `predict` by what is fitted; `at`: the answer there."""
        found = np.zeros((*at.shape, len(logs)))
        for column, (name, engine) in enumerate(COLUMNS):
            moved = logs.copy()
            moved[column] += step
            fit = of_logs(moved)
            if name in _ADDED:
                found[:, 1, column] = (self._waits(fit) - self._waits(of_logs(logs))) / np.exp(at[:, 1]) / step
            else:
                found[:, :, column] = (self.predict(fit, engine, at) - at) / step
        return found

    def _waits(self, fit: Fit) -> Float64:
        return np.array([fit.waits_s(one) for one in self.rows])


class Aggregated(Predicted):
    """Rows of engines with one pool, prepared to be predicted again and again; equal loads are played once."""

    def __init__(self, rows: Sequence[Measured], waves: int = PLAYED, tables: OperatorTables | None = None) -> None:
        super().__init__(rows)
        self.tables = tables
        keys = [(one.deployment, one.prompt, one.output, one.clients, one.harness == "other") for one in rows]
        played = dict(zip(keys, rows, strict=True))
        where = {key: at for at, key in enumerate(played)}
        self._at = np.array([where[key] for key in keys])
        self._played = tuple(played.values())
        self._lengths = [lengths(one, waves) for one in self._played]
        self._recipes = [recipe(one) for one in self._played]
        self._capacity = [capacity(one, one.layout) for one in self._played]

    def predict(self, found: Fit, only: str = "", known: Float64 | None = None) -> Float64:
        """(n, 2) logarithms of TPOT and TTFT. `known`: an answer, of which rows of engine `only` are renewed."""
        answers = np.exp(known) if known is not None else np.empty((len(self.rows), 2))
        times = np.empty((len(self._played), 2))
        tables: dict[tuple[object, ...], LoopTable] = {}
        for i, one in enumerate(self._played):
            if only and one.engine != only:
                continue
            table = tables.get(one.deployment)
            if table is None:
                table = tables[one.deployment] = tabled(one, one.layout, found.laws[one.engine])
            if self.tables is not None:
                table = measured_operators(one, found.laws[one.engine], self.tables)
            prompts, outputs, clients = self._lengths[i]
            set_up = self._recipes[i]
            arrived, first, ended = (np.zeros(len(prompts)) for _ in range(3))
            front = found.client["front_s"] + found.client["front_per_token_s"] * prompts.astype(np.float64)
            play(table, prompts, outputs, clients, set_up.most, self._capacity[i], set_up.budget, set_up.mixed,
                 set_up.poll, set_up.gather, set_up.wait, front, arrived, first, ended)  # fmt: skip
            share = 0.0 if one.harness == "other" else 1 / WAVES
            ttft, tpot = mean_times(arrived, first, ended, outputs, clients, share)
            times[i] = tpot, ttft
        for i, (one, at) in enumerate(zip(self.rows, self._at, strict=True)):
            if not only or one.engine == only:
                answers[i] = times[at] + (0.0, found.waits_s(one))
        found_logs: Float64 = np.log(answers)
        return found_logs


def fitted(data: Predicted, prior: float = 0.05, rounds: int = 12, start: Float64 = DEFAULTS) -> Float64:
    """What fits these rows best: pseudo-Huber loss, by Levenberg and Marquardt, near `start` by `prior`."""
    logs, damping = start.copy(), 1e-2
    pull = (prior / _SPREAD) ** 2 * len(data.rows)
    at = data.predict(of_logs(logs))

    def loss(answers: Float64, where: Float64) -> tuple[float, Float64]:
        errors = (answers - data.measured) / data.scales
        weights = 1 / np.sqrt(1 + errors**2)
        pulled = pull @ (where - start) ** 2
        return float((2 * (np.sqrt(1 + errors**2) - 1)).sum() + pulled), weights

    best, weights = loss(at, logs)
    for _ in range(rounds):
        slopes = (data.slopes(logs, at) / data.scales[:, None] * np.sqrt(weights)[..., None]).reshape(-1, len(logs))
        errors = ((data.measured - at) / data.scales * np.sqrt(weights)).ravel()
        normal = slopes.T @ slopes + np.diag(pull)
        target = slopes.T @ errors - pull * (logs - start)
        gained = 0.0
        for _ in range(6):
            move = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), target), -1, 1)
            tried = data.predict(of_logs(logs + move))
            value, new = loss(tried, logs + move)
            if value < best:
                gained, best, weights, logs, at = best - value, value, new, logs + move, tried
                damping /= 5
                break
            damping *= 5
        if gained < 1e-4 * best:
            break
    return logs


class Disaggregated(Predicted):
    """Rows whose prompts have workers of their own: two stations in a closed loop, decoding undisturbed by prompts.

    TTFT hardly counts in a fit: seconds of cold starts and of transfers are in it.

    With so many requests in flight, the stations' rates balance: X = min(rate of the prompts' workers, clients / (time
    of a prompt + time of decoding)). Decoding holds X times its own time, by Little's law, and the rest waits.
    """

    scales = np.array([0.15, 3.0])

    def predict(self, found: Fit, only: str = "", known: Float64 | None = None) -> Float64:
        """(n, 2) logarithms of TPOT and TTFT; see `Aggregated.predict`."""
        answers = np.exp(known) if known is not None else np.empty((len(self.rows), 2))
        tables: dict[tuple[object, ...], tuple[LoopTable, LoopTable]] = {}
        for i, one in enumerate(self.rows):
            if (only and one.engine != only) or one.prefill is None:
                continue
            both = tables.get(one.deployment)
            if both is None:
                law = found.laws[one.engine]
                both = tables[one.deployment] = tabled(one, one.layout, law), tabled(one, one.prefill, law)
            tpot, ttft = balanced(one, *both)
            answers[i] = tpot, ttft + found.waits_s(one)
        found_logs: Float64 = np.log(answers)
        return found_logs


def balanced(one: Measured, decode: LoopTable, prefill: LoopTable) -> tuple[float, float]:
    """TPOT and TTFT where the stations' rates balance."""
    assert one.prefill is not None
    prompt, output = 0.9 * one.prompt, 0.9 * one.output
    together = one.prefill.dp  # prompts of a step: one for each group
    alone = (
        float(np.interp(prompt * together, prefill.tokens, prefill.linear_s)) + float(prefill.output_s[0])
        + prefill.per_pair * together * prompt**2 / 2 + prefill.host_s
    )  # fmt: skip
    rate = one.prefill_workers * together / alone
    batch, tpot, seconds = one.clients / one.decode_workers, 0.0, alone
    for _ in range(30):
        tpot = (
            float(np.interp(batch, decode.tokens, decode.linear_s))
            + float(np.interp(batch, decode.sequences, decode.output_s))
            + decode.per_context * batch * (prompt + output / 2) + decode.host_s + decode.host_per_sequence_s * batch
        )  # fmt: skip
        seconds = tpot * output
        flow = min(rate, one.clients / (alone + seconds))
        batch += 0.5 * (max(flow * seconds / one.decode_workers, 1.0) - batch)
    flow = min(rate, one.clients / (alone + seconds))
    return tpot, max(one.clients / flow - seconds, alone)
