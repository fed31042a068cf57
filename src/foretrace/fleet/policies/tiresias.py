"""Tiresias (Gu et al., NSDI 2019): discretised two-dimensional least attained service, and its Gittins variant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import Float64

# Models whose tensors are of like size and which the Dally study lets spread (Tiresias, section 3.3: skew of tensors).
LOW_SKEW = ("resnet50", "resnet18", "bert")


def tiresias(
    *, thresholds: tuple[float, ...] = (3600.0, 57600.0), spread: tuple[str, ...] = LOW_SKEW, consolidate: bool = True
) -> Policy:
    """2D-LAS in bands: jobs sink as their GPU-seconds pass the thresholds; in a band by submission; bands preempt.

    thresholds: GPU-seconds (57,600 is 16 GPU-hours, as Pollux's authors ran it). spread: models that may lie across
    machines; all others wait for the tightest unit that can hold them. Not here: promotion of starved jobs.
    """
    return Policy(
        name="tiresias",
        order_rule="queues",
        preempt_rule="always",
        thresholds_gpu_s=thresholds,
        place_rule="strict" if consolidate else "greedy",
        eager_models=frozenset(spread),
    )


def gittins(
    *, history: str, thresholds: tuple[float, ...] = (3600.0, 57600.0), spread: tuple[str, ...] = LOW_SKEW
) -> Policy:
    """Tiresias with a 2D-Gittins index in every band but the last: the more likely a job is to end soon for the GPU
    time that it would take, the earlier it is served.

    history: file with GPU-seconds of past jobs, one number per line under a header; it is where the likelihood comes
    from (Tiresias, section 3.2).
    """
    at, value = gittins_table(_samples(Path(history)))
    index = {"service_gpu_s": tuple(at.tolist()), "value": tuple(value.tolist())}
    return replace(tiresias(thresholds=thresholds, spread=spread), name="gittins", index=index)


def gittins_table(samples: Float64, *, points: int = 256) -> tuple[Float64, Float64]:
    """Return service levels (GPU-seconds, from 0) and the Gittins index there, per GPU-second.

    G(a) = sup over Δ of P(S − a ≤ Δ | S > a) / E[min(S − a, Δ) | S > a], S the service a job needs in all, by the
    empirical distribution: the supremum is reached at one of the samples.
    """
    sizes = np.sort(samples[samples > 0])
    if not len(sizes):
        raise ForetraceError("the history of GPU time has no number above 0; name one with the service of past jobs.")
    quantiles = np.quantile(sizes, np.linspace(0, 1, points), method="lower")
    at = np.unique(np.concatenate([[0.0], quantiles[:-1]]))
    cumulative = np.concatenate([[0.0], np.cumsum(sizes)])
    values = np.zeros(len(at))
    for i, a in enumerate(at):
        first = int(np.searchsorted(sizes, a, side="right"))
        left = sizes[first:]
        if not len(left):
            continue
        count = np.arange(1, len(left) + 1)
        # E[min(S − a, Δ)] at Δ = left − a: those that end by then, and Δ for the others
        ended = cumulative[first + 1 :] - cumulative[first] - count * a
        cost = ended + (len(left) - count) * (left - a)
        values[i] = (count / np.maximum(cost, 1e-12)).max()
    return at, values


def _samples(path: Path) -> Float64:
    from foretrace.fleet.formats.source import load

    found = []
    for number, line in enumerate(load(path).text.splitlines(), 1):
        text = line.strip()
        if not text or (number == 1 and not text[:1].isdigit()):
            continue
        try:
            found.append(float(text.split(",")[-1]))
        except ValueError:
            raise ForetraceError(f"{path} line {number}: {text!r} is no number of GPU-seconds; correct it.") from None
    return np.array(found)
