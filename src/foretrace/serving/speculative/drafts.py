"""Search of drafts for a target: depth x width within a budget of parameters or latency, ranked by predicted speed-up.

Latencies come from the step times of the engine's law (`serving/llm`). A draft of a search was never trained, so what
the target accepts of it is a rate by parameters (`published_rate`), or one that the user states for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import log, sqrt
from typing import Any

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.llm.deployment import beside, step_times
from foretrace.serving.llm.drafted import HOST, checked_draft, draft_like, pass_seconds, read_draft
from foretrace.serving.llm.metrics import Latency, RangedFigure
from foretrace.serving.llm.served_model import ServedModel, served_model
from foretrace.serving.llm.simulation import Simulated
from foretrace.serving.llm.step_law import StepLaw
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.speculative import rounds
from foretrace.serving.speculative.rounds import MOST_K, RoundTimes, Speculated, speculated
from foretrace.techniques.compute.acceptance import Acceptance, checked_k

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
BATCHES = tuple(2**i for i in range(11))
_UTILISATION = 0.9  # of a device's memory, as engines take it
_SHARE = 1 / 10  # of the target's parameters: the budget where none is stated
#: What targets accepted of drafts, by parameters of the draft (Leviathan et al., ICML 2023, table 3): T5 for T5-XXL,
#: translating and summarising, and LaMDA for LaMDA of 137 B parameters, each at temperatures 1 and 0.
PUBLISHED_RATES = (
    ((77e6, 0.62), (250e6, 0.68), (800e6, 0.71)),
    ((77e6, 0.75), (250e6, 0.80), (800e6, 0.82)),
    ((77e6, 0.53), (250e6, 0.55), (800e6, 0.56)),
    ((77e6, 0.65), (250e6, 0.73), (800e6, 0.74)),
    ((100e6, 0.57), (2e9, 0.71), (8e9, 0.74)),
    ((100e6, 0.61), (2e9, 0.71), (8e9, 0.75)),
)
_T80 = 1.886  # of Student's distribution, 80 % two-sided, with a degree of freedom less than there are pairs of models


class RankedDraft(Speculated, frozen=True, kw_only=True):
    """A draft, the k that is best for it, and what it gains. Ranges are 80 %."""

    layers: int
    width: int
    parameters: int
    latency_s: float  # of a pass over one token of each sequence
    latency_low_s: float
    latency_high_s: float
    acceptance: str
    must_be_below_s: float  # latency at which rounds of this k gain nothing; 0 where none is small enough
    hurts_from_batch: int | None  # from which batch on rounds of this k are slower than none; null: none up to 1,024


@dataclass(frozen=True, kw_only=True)
class DraftSetting:
    """What a draft is for: a target on devices, and what is decoded."""

    target: ServedModel
    device: str
    layout: dict[str, Any] = field(default_factory=dict)  # of the target: further arguments of `step_times`
    law: StepLaw | None = None  # instead of the engine's
    batch: int = 1
    context: int = 1024  # tokens that a sequence attends to
    k: int = 0  # 0: the best

    def __post_init__(self) -> None:
        """Check the numbers. Raises ForetraceError."""
        if self.batch < 1 or self.context < 1:
            raise ForetraceError(
                f"`batch=` and `context=` must be 1 or more, got {self.batch} and {self.context}; give what is decoded."
            )
        if int(self.layout.get("pp", 1)) > 1:
            raise ForetraceError("drafts are timed for targets without a pipeline; use `tp=` in place of `pp=`.")
        if self.k:
            checked_k(self.k)

    def steps(self, model: ServedModel) -> StepTimes:
        """Return step times of the target, or of a draft, which has one device."""
        layout = self.layout if model is self.target else beside(self.layout, model)
        return step_times(model, self.device, law=self.law, **layout)


@cache
def published_law() -> tuple[float, float, float]:
    """Return a line through `PUBLISHED_RATES`: rate at 1 parameter, more per e-fold, and how far another pair may be
    off.

    The slope is that within series. Series differ by more than drafts within one, so the 80 % range is that of the
    level of another series; two temperatures of a pair count as one.
    """
    logs = np.log([[parameters for parameters, _ in each] for each in PUBLISHED_RATES])
    rates = np.array([[rate for _, rate in each] for each in PUBLISHED_RATES])
    within = logs - logs.mean(1, keepdims=True)
    slope = (within * rates).sum() / np.square(within).sum()
    levels = (rates - slope * logs).mean(1)
    return float(levels.mean()), float(slope), float(_T80 * levels.std(ddof=1) * sqrt(1 + 1 / len(levels)))


def published_rate(parameters: float) -> tuple[float, float]:
    """Return the 80 % range of the rate at which targets accept what a draft of so many parameters proposes.

    Beyond the parameters of the published drafts it widens by the slope of the line on either side.
    """
    level, slope, off = published_law()
    known, at = [log(each) for series in PUBLISHED_RATES for each, _ in series], log(max(parameters, 1))
    off = min(off + slope * max(min(known) - at, at - max(known), 0.0), 0.5)
    middle = min(max(level + slope * at, off), 1 - off)
    return middle - off, middle + off


def modelled_rounds(target: StepTimes, draft: StepTimes, *, batch: int, context: int, most: int = MOST_K) -> RoundTimes:
    """Return the parts of a round by step times; a pass of the draft takes a share of the host's time of a step."""
    t, d = target.table, draft.table
    host = t.host_s + t.host_per_sequence_s * batch
    one = pass_seconds(draft, batch, 1, context)
    low, middle, high = (share * host for share in HOST)
    return RoundTimes(
        verify_s=tuple(host + pass_seconds(target, batch, m, context) for m in range(1, most + 2)),
        draft_s=one + middle, catch_up_s=max(pass_seconds(draft, batch, 2, context) - one, 0.0), batch=batch,
        low=(d.low * one + low) / (one + middle), high=(d.high * one + high) / (one + middle),
        verify_low=t.low, verify_high=t.high,
    )  # fmt: skip


def timed_draft(
    setting: DraftSetting, draft: ServedModel, acceptance: str = "", steps: tuple[StepTimes, StepTimes] | None = None
) -> RankedDraft:
    """Return what one draft gains; `steps`: of target and draft, if known. Raises ForetraceError where it can
    be none.
    """
    checked_draft(setting.target, draft)
    target, small = steps or (setting.steps(setting.target), setting.steps(draft))

    def times_of(batch: int) -> RoundTimes:
        return modelled_rounds(target, small, batch=batch, context=setting.context, most=max(MOST_K, setting.k))

    text = acceptance or "{:.2f}-{:.2f}".format(*published_rate(draft.parameters))
    accepted, times = Acceptance.of(text), times_of(setting.batch)
    found = speculated(times, accepted, setting.k) if setting.k else rounds.best(times, accepted)
    return RankedDraft(
        layers=draft.layers, width=draft.hidden, parameters=draft.parameters, latency_s=times.draft_s,
        latency_low_s=times.low * times.draft_s, latency_high_s=times.high * times.draft_s, acceptance=text,
        must_be_below_s=max(rounds.break_even_draft_s(times, accepted, found.k), 0.0),
        hurts_from_batch=rounds.break_even_batch(times_of, accepted, found.k, BATCHES),
        **msgspec.structs.asdict(found),
    )  # fmt: skip


class BatchGain(msgspec.Struct, frozen=True, kw_only=True):
    """Speed-up of decoding so many sequences together, with its 80 % range."""

    batch: int
    speedup: float
    speedup_low: float
    speedup_high: float


class ServedDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft does to a simulated engine: at its mean batch and others, and the engine without it."""

    draft: str
    batch: int  # sequences that run while any does, mean
    rounds: RankedDraft  # at that batch
    by_batch: tuple[BatchGain, ...]
    tpot_without_s: Latency
    tokens_per_s_without: RangedFigure


def served_draft(found: Simulated) -> ServedDraft | None:
    """Return what the draft of a simulation gains, batch by batch; None without one."""
    config, plain = found.config, found.plain
    if plain is None:
        return None
    target, (batch, context) = served_model(config.model), found.decoding
    draft = read_draft(config.draft, target)
    known = {
        n: timed_draft(
            DraftSetting(target=target, device=config.device, layout=config.layout, batch=n, context=context,
                         k=config.k), draft, config.acceptance,
        )
        for n in {batch, *(each for each in BATCHES if each <= config.rules.sequences)}
    }  # fmt: skip
    return ServedDraft(
        draft=config.draft, batch=batch, rounds=known[batch], tpot_without_s=plain.latencies["tpot"],
        tokens_per_s_without=plain.rates["tokens_per_s"],
        by_batch=tuple(
            BatchGain(batch=n, speedup=each.speedup, speedup_low=each.speedup_low, speedup_high=each.speedup_high)
            for n, each in sorted(known.items())
        ),
    )  # fmt: skip


def search_drafts(
    setting: DraftSetting, *, acceptance: str = "", parameters: float = 0.0, latency_s: float = 0.0
) -> tuple[RankedDraft, ...]:
    """Return drafts within the budget, the quickest first.

    Args:
        setting: what they are for.
        acceptance: of all drafts, as `Acceptance` reads it; by default a range by parameters.
        parameters: at most, embedding and output included; 0: a tenth of the target's, where no latency is stated.
        latency_s: of a pass at most; 0: any.

    Raises:
        ForetraceError: nothing fits the budget, or a number cannot be.

    """
    if not (parameters >= 0 and latency_s >= 0):
        raise ForetraceError(
            f"a budget must be 0 or more, got {parameters:g} parameters and {latency_s:g} s; state one."
        )
    target = setting.target
    most = parameters or (0.0 if latency_s else _SHARE * target.parameters)
    times = setting.steps(target)
    tokens, rows = setting.batch * setting.context, setting.batch * (max(MOST_K, setting.k) + 1)
    free = times.capacity_tokens(_UTILISATION, rows) - tokens
    if free < 0:
        raise ForetraceError(
            f"{target.name} does not fit with {tokens:,} tokens: a device has {times.memory_bytes / 1e9:.4g} GB for "
            f"{times.weight_bytes / 1e9:.4g} GB of weights and {tokens * times.kv_bytes_per_token / 1e9:.4g} GB of "
            "keys and values; use a larger `tp=`, or a smaller `batch=` or `context=`."
        )
    widths = [256 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64) if 256 * n <= target.hidden]
    found = []
    shapes = [(layers, width) for layers in DEPTHS for width in widths if layers <= target.layers]
    for draft in (draft_like(target, *shape) for shape in shapes):
        if draft.active_parameters >= target.active_parameters or (most and draft.parameters > most):
            continue
        small = setting.steps(draft)
        if small.weight_bytes + tokens * small.kv_bytes_per_token > free * times.kv_bytes_per_token:
            continue  # on one of the target's devices
        one = timed_draft(setting, draft, acceptance, (times, small))
        if not latency_s or one.latency_s <= latency_s:
            found.append(one)
    if not found:
        raise ForetraceError(
            f"no draft with the {target.words:,} tokens of {target.name} fits the budget and beside it; allow more."
        )
    return tuple(sorted(found, key=lambda each: -each.speedup))
