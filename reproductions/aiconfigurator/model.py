"""TTFT and TPOT of measured servers by the law of a step and a closed loop: what is fitted, and to which rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.hardware.devices import named
from foretrace.serving.llm.deployment import memory, step_times
from foretrace.serving.llm.operator_tables import OperatorTables
from foretrace.serving.llm.served_model import served_model
from foretrace.serving.llm.step_law import LawTimes, Layout, StepLaw, law_of, number_format
from foretrace.serving.llm.step_times import along
from reproductions.aiconfigurator.closed_loop import OTHERS, SEQUENCES, TOKENS, play
from reproductions.aiconfigurator.sample import SYSTEMS, Measured

WAVES = 10  # prompts for each client, by the public recipes
PLAYED = 4  # waves that are played: the first is one of ten, the others stand for the rest
LEAST = 24
UTILISATION = 0.92
_ROUNDS = 14  # of a fit, at most
_BALANCED = 30  # rounds in which the rates of two pools find their balance


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


def dense(one: Measured) -> bool:
    """Whether operators of this row were measured: all products and attention of a dense model on an H100."""
    return one.architecture == "llama-3-8b" and one.system == "h100_sxm"


def lengths(one: Measured, waves: int = PLAYED) -> tuple[Int64, Int64]:
    """Prompts and outputs of the requests that are played."""
    count = max(waves * one.clients, LEAST)
    random = np.random.default_rng(0)
    low, high = (0.9, 1.1) if one.harness == "other" else (0.8, 1.0)
    prompts = np.round(one.prompt * random.uniform(low, high, count)).astype(np.int64)
    outputs = np.round(one.output * random.uniform(low, high, count)).astype(np.int64)
    return prompts, outputs


def capacity(one: Measured) -> float:
    """Tokens that the engine caches."""
    held = memory(times(one, one.layout, law_of(one.engine)))
    return max(held["memory_bytes"] * UTILISATION - held["weight_bytes"], 1e9) / held["kv_bytes_per_token"]


def played(one: Measured, waves: int = PLAYED) -> Float64:
    """What mean TPOT and TTFT of this row consist of, see `play`."""
    prompts, outputs = lengths(one, waves)
    by = recipe(one)
    share = 0.0 if one.harness == "other" else 1 / WAVES
    return play(TOKENS, SEQUENCES, prompts, outputs, one.clients, by.most, capacity(one), by.budget, by.mixed, by.poll,
                by.gather, by.wait, share)  # fmt: skip


def times(one: Measured, layout: Layout, law: StepLaw, form: type[LawTimes] = LawTimes) -> LawTimes:
    """The parts of a step of this row, by the law or by another `form` of it."""
    return form(
        model=served_model(one.architecture), device=named(SYSTEMS[one.system]), layout=layout,
        kept=number_format(one.dtype), law=law,
    )  # fmt: skip


def components(found: LawTimes) -> Float64:
    """(..., K) seconds that `played` counts, of a law whose numbers may be (..., 1) arrays."""
    parts = (
        found.linear(TOKENS), found.output(SEQUENCES), found.decode_per_token, found.prefill_per_pair,
        found.law.host_s, found.law.host_per_sequence_s / found.layout.dp,
    )  # fmt: skip
    return np.concatenate([np.atleast_1d(each) for each in parts], axis=-1)


def measured_components(one: Measured, law: StepLaw, tables: OperatorTables) -> Float64:
    """The same from measured operators, attention at this row's batch and mean context."""
    found = components(times(one, one.layout, law))
    steps = step_times(one.architecture, SYSTEMS[one.system], tp=one.layout.tp, dp=one.layout.dp, ep=one.layout.ep,
                       dtype=one.dtype, engine=one.engine, tables=tables, law=law).table  # fmt: skip
    batch, context = float(one.clients), one.prompt + one.output / 2
    decode = along(
        steps.mean_context, np.array([along(steps.batch, each, batch) for each in steps.decode_s.T]), context
    )
    by_pair = along(steps.chunk, np.ascontiguousarray(steps.prefill_s[:, 0]), float(one.prompt)) / (one.prompt**2 / 2)
    linear = [along(steps.tokens, steps.linear_s, each) for each in TOKENS]
    output = [along(steps.sequences, steps.output_s, each) for each in SEQUENCES]
    return np.concatenate([linear, output, [decode / (batch * context), by_pair], found[-2:]])


# What is fitted: the law of a step, some of it for each engine, and what else a client waits for.
ENGINES = ("vllm", "sglang", "trtllm")
NAMES = tuple(each.name for each in fields(StepLaw) if not each.name.endswith(("engine", "low", "high")))
PER_ENGINE = ("kernel_s", "host_s", "host_per_sequence_s", "launch_s", "expert_rate", "collective_s")
COLD_S = 1.0  # mean over all requests of what the first ones of an engine that was not warm wait
COLUMNS = (
    *((name, engine) for name in NAMES for engine in (ENGINES if name in PER_ENGINE else ("",))),
    ("cold_s", ""),
)
DEFAULTS = np.log([getattr(StepLaw(), name, COLD_S) for name, _ in COLUMNS])
# How far a number may be from where it starts, in logarithms: rates are shares of peaks, latencies are less known.
_SPREAD = np.array([0.2 if name.endswith(("_rate", "_flops", "_fp4")) else 1.0 for name, _ in COLUMNS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The law of each engine, and the other numbers of `COLUMNS`; arrays (P, 1) where there are P fits."""

    laws: Mapping[str, StepLaw]
    cold_s: Any


def of_logs(logs: Float64) -> Fit:
    """The fit whose numbers have these logarithms (..., columns), in the order of COLUMNS."""
    numbers = np.exp(logs)
    values: dict[tuple[str, str], Any] = {
        column: float(numbers[i]) if numbers.ndim == 1 else numbers[:, i : i + 1] for i, column in enumerate(COLUMNS)
    }
    laws = {
        engine: StepLaw(engine=engine, **{name: values[name, engine if name in PER_ENGINE else ""] for name in NAMES})
        for engine in ENGINES
    }
    return Fit(laws=laws, cold_s=values["cold_s", ""])


class Predicted:
    """Rows and what was measured of them, to be predicted again and again."""

    scales = np.array([0.15, 0.3])  # errors of logarithms of TPOT and TTFT from which on they count linearly

    def __init__(self, rows: Sequence[Measured], form: type[LawTimes] = LawTimes) -> None:
        self.rows, self.form = tuple(rows), form
        self.measured = np.log([[one.tpot_s, one.ttft_s] for one in rows])
        # TTFT of dense Llama holds a wait that no input states, so that it is no part of what others are fitted to.
        self.counted = np.array([[True, not dense(one)] for one in rows])
        self._deployments: dict[Hashable, list[int]] = defaultdict(list)
        for i, one in enumerate(rows):
            self._deployments[one.deployment].append(i)

    def predict(self, logs: Float64) -> Float64:
        """(P, n, 2) logarithms of TPOT and TTFT by P fits, `logs` (P, columns)."""
        raise NotImplementedError

    def _waits(self, fit: Fit) -> Float64:
        """(P, n) seconds."""
        found = [
            times(one, one.layout, fit.laws[one.engine], self.form).request_s
            + (fit.cold_s if one.harness == "cold" else 0.0)
            for one in self.rows
        ]
        return np.concatenate(found, axis=1)


class Aggregated(Predicted):
    """Rows of engines with one pool. `plays` keeps what each row is made of, for other fits."""

    plays: dict[Hashable, Float64] = {}  # noqa: RUF012  # of this process

    def __init__(
        self, rows: Sequence[Measured], tables: OperatorTables | None = None, form: type[LawTimes] = LawTimes
    ) -> None:
        super().__init__(rows, form)
        self.tables = tables
        made = []
        for one in rows:
            key = (one.deployment, one.prompt, one.output, one.clients, one.harness == "other")
            if key not in self.plays:
                self.plays[key] = played(one)
            made.append(self.plays[key])
        self._made = np.array(made)  # (n, 2, K)

    def predict(self, logs: Float64) -> Float64:
        """See `Predicted.predict`."""
        fit = of_logs(logs)
        seconds = np.empty((len(logs), len(self.rows), 2))
        for at in self._deployments.values():
            one = self.rows[at[0]]
            if self.tables is None:
                each = components(times(one, one.layout, fit.laws[one.engine], self.form))
                seconds[:, at] = (each @ self._made[at].reshape(-1, each.shape[-1]).T).reshape(len(logs), len(at), 2)
            else:
                law = of_logs(logs[0]).laws[one.engine]
                for i in at:
                    seconds[0, i] = self._made[i] @ measured_components(self.rows[i], law, self.tables)
        seconds[..., 1] += self._waits(fit)
        return np.log(seconds)


class Disaggregated(Predicted):
    """Rows whose prompts have workers of their own: two stations in a closed loop, decoding undisturbed by prompts.

    TTFT hardly counts in a fit: seconds of cold starts and of transfers are in it.

    With so many requests in flight, the stations' rates balance: X = min(rate of the prompts' workers, clients / (time
    of a prompt + time of decoding)). Decoding holds X times its own time, by Little's law, and the rest waits.
    """

    scales = np.array([0.15, 3.0])

    def __init__(self, rows: Sequence[Measured]) -> None:
        super().__init__(rows)
        self._sizes = np.array([(one.clients, one.decode_workers, one.prefill_workers, one.prefill.dp, 0.9 * one.prompt,
                                 0.9 * one.output) for one in rows if one.prefill is not None]).T  # fmt: skip

    def predict(self, logs: Float64) -> Float64:
        """See `Predicted.predict`."""
        fit = of_logs(logs)
        both = np.empty((2, len(logs), len(self.rows), len(TOKENS) + len(SEQUENCES) + OTHERS))
        for at in self._deployments.values():
            one = self.rows[at[0]]
            for pool, layout in zip(both, (one.layout, one.prefill), strict=True):
                assert layout is not None
                pool[:, at] = components(times(one, layout, fit.laws[one.engine]))[:, None]
        clients, decoders, workers, together, prompt, output = self._sizes

        def stepped(pool: Float64, tokens: Float64, sequences: Float64) -> Float64:
            """(P, n) seconds of a step, attention aside; the host works for each group of attention apart."""
            linear, made = pool[..., : len(TOKENS)], pool[..., len(TOKENS) : -OTHERS]
            host = pool[..., -2] + pool[..., -1] * sequences
            return _at(TOKENS, linear, tokens) + _at(SEQUENCES, made, sequences) + host

        decode, prefill = both
        alone = stepped(prefill, prompt * together, together) + prefill[..., -3] * together * prompt**2 / 2
        batch = np.broadcast_to(clients / decoders, alone.shape)
        for _ in range(_BALANCED):
            tpot = stepped(decode, batch, batch) + decode[..., -4] * batch * (prompt + output / 2)
            flow = np.minimum(workers * together / alone, clients / (alone + tpot * output))
            batch = batch + 0.5 * (np.maximum(flow * tpot * output / decoders, 1.0) - batch)
        ttft = np.maximum(clients / flow - tpot * output, alone) + self._waits(fit)
        found: Float64 = np.log(np.stack([tpot, ttft], axis=-1))
        return found


def _at(grid: Float64, values: Float64, x: Float64) -> Float64:
    """Times (..., grid) at x (...)."""
    low = np.broadcast_to(np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2), values.shape[:-1])
    share = (x - grid[low]) / (grid[low + 1] - grid[low])
    first, second = (np.take_along_axis(values, each[..., None], -1)[..., 0] for each in (low, low + 1))
    found: Float64 = first + share * (second - first)
    return found


def fitted(data: Predicted, prior: float = 0.05, start: Float64 = DEFAULTS) -> Float64:
    """What fits these rows best: pseudo-Huber loss, by Levenberg and Marquardt, near `start` by `prior`."""
    logs, count, damping = start, len(start), 1e-2
    pull = (prior / _SPREAD) ** 2 * len(data.rows)
    moved = np.concatenate([np.zeros((1, count)), 1e-3 * np.eye(count)])

    def seen(logs: Float64) -> tuple[float, Float64, Float64]:
        """The loss, and the normal equations of a step."""
        found = data.predict(logs + moved)
        errors = (data.measured - found[0]) / data.scales * data.counted
        slopes = ((found[1:] - found[0]) / 1e-3 / data.scales * data.counted).reshape(count, -1)
        weights = 1 / np.sqrt(1 + errors**2)
        loss = 2 * (1 / weights - 1).sum() + pull @ (logs - start) ** 2
        weighted = slopes * weights.ravel()
        return float(loss), weighted @ slopes.T + np.diag(pull), weighted @ errors.ravel() - pull * (logs - start)

    best, normal, target = seen(logs)
    for _ in range(_ROUNDS):
        move = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), target), -1, 1)
        tried = seen(logs + move)
        if tried[0] < best:
            gained, (best, normal, target), logs, damping = best - tried[0], tried, logs + move, damping / 5
            if gained < 1e-4 * best:
                break
        else:
            damping *= 5
    return logs
