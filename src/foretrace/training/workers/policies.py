"""The policies that are here, and `parse`, which reads one as it is written: "gaia threshold=0.1"."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, inf, isfinite, sqrt
from typing import ClassVar

import numpy as np

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.names import chosen, keyed
from foretrace.training.compression.settings import CompressionSettings, kept, share_at
from foretrace.training.workers.adsp import Adsp
from foretrace.training.workers.policy import Commit, Every, Pace, SyncPolicy

_MOST_STEPS = 1_000_000
_TINY = 1e-12  # weights below count as this: else no update of a weight of 0 is ever insignificant


@dataclass(frozen=True, kw_only=True)
class Synchronous(SyncPolicy):
    """Everyone waits for everyone after every step (bulk synchronous parallel: Valiant, CACM 1990)."""

    name: ClassVar[str] = "synchronous"


@dataclass(frozen=True, kw_only=True)
class StaleSynchronous(SyncPolicy):
    """Workers commit every step, and wait when too far ahead of the slowest one (Ho et al., NeurIPS 2013)."""

    name: ClassVar[str] = "stale-synchronous"
    knob: ClassVar[str] = "staleness"
    staleness: int = 3

    def __post_init__(self) -> None:
        self.need("staleness", 0, _MOST_STEPS)

    @property
    def lag(self) -> float:  # type: ignore[override]  # a constant of other policies
        """Commits ahead of the slowest."""
        return self.staleness


@dataclass(frozen=True, kw_only=True)
class LocalSGD(SyncPolicy):
    """Everyone trains alone for some steps, then models are averaged, weighted by samples.

    McMahan et al., AISTATS 2017 (FedAvg); Stich, ICLR 2019.
    """

    name: ClassVar[str] = "local-sgd"
    knob: ClassVar[str] = "every"
    every: int = 8

    def __post_init__(self) -> None:
        self.need("every", 1, _MOST_STEPS)

    def pace(self, workers: int) -> Pace:
        return Every(self.every)


@dataclass(frozen=True, kw_only=True)
class AdaComm(SyncPolicy):
    """Local SGD whose steps between averages fall with the loss (Wang and Joshi, MLSys 2019, equation 18)."""

    name: ClassVar[str] = "adacomm"
    knob: ClassVar[str] = "every"
    every: int = 8  # steps between averages at first
    interval_s: float = 10.0  # after which the number of steps is set again
    factor: float = 0.5  # of the steps, where the loss alone would not lower them

    def __post_init__(self) -> None:
        self.need("every", 1, _MOST_STEPS)
        self.need("interval_s", 1e-9, inf)
        self.need("factor", 0, 1)

    def pace(self, workers: int) -> Pace:
        return _AdaPace(self)


class _AdaPace(Pace):
    def __init__(self, policy: AdaComm) -> None:
        self.policy, self.count = policy, policy.every
        self.first = 0.0  # loss of the first commits
        self.next_s = policy.interval_s
        self.recent: list[float] = []

    def steps(self, worker: int, now_s: float) -> int:
        if now_s >= self.next_s and self.recent:
            now = float(np.mean(self.recent))
            self.first = self.first or now
            wanted = ceil(self.policy.every * sqrt(max(now, 0.0) / self.first)) if self.first > 0 else 1
            if wanted >= self.count:
                wanted = ceil(self.policy.factor * self.count)
            self.count = max(wanted, 1)
            self.next_s = now_s + self.policy.interval_s
            self.recent.clear()
        return self.count

    def saw(self, commit: Commit, now_s: float) -> None:
        if isfinite(commit.loss):
            self.first = self.first or commit.loss
            self.recent.append(commit.loss)


@dataclass(frozen=True, kw_only=True)
class Gaia(SyncPolicy):
    """Only updates that are large beside their weight are sent; the others stay with their worker until they are.

    Hsieh et al., NSDI 2017, section 3; ICML 2020, algorithm 1.

    What is sent is averaged over all workers, as gradients of synchronous training are; the paper adds it up, which is
    the same at a rate as many times as large. Rates are constant here, so the threshold is.
    """

    name: ClassVar[str] = "gaia"
    knob: ClassVar[str] = "threshold"
    sparse: ClassVar[bool] = True
    threshold: float = 0.1  # of an update over its weight

    def __post_init__(self) -> None:
        self.need("threshold", 0, 1e6)

    def chosen(self, pending: Float32, model: Float32, step: int) -> Int64:
        return np.flatnonzero(np.abs(pending) >= np.float32(self.threshold) * np.maximum(np.abs(model), _TINY))


@dataclass(frozen=True, kw_only=True)
class DeepCompression(SyncPolicy):
    """The largest updates are sent after every step; the others add up, and act on no model until they are sent.

    Lin et al., ICLR 2018, algorithms 1 and 4.
    """

    name: ClassVar[str] = "dgc"
    knob: ClassVar[str] = "share"
    local: ClassVar[bool] = False
    sparse: ClassVar[bool] = True
    share: float = 0.01  # of the elements
    momentum: float = 0.0  # type: ignore[misc]  # a constant of other policies
    warm_steps: int = 0  # in which more is sent

    def __post_init__(self) -> None:
        self.need("share", 1e-9, 1)
        self.need("momentum", 0, 0.999)
        self.need("warm_steps", 0, _MOST_STEPS)

    def chosen(self, pending: Float32, model: Float32, step: int) -> Int64:
        settings = CompressionSettings(method="dgc", share=self.share, warm_steps=self.warm_steps)
        count = kept(len(pending), share_at(settings, step - 1))
        if count == len(pending):
            return np.arange(count)
        return np.sort(np.argpartition(np.abs(pending), len(pending) - count)[-count:])


POLICIES: dict[str, type[SyncPolicy]] = {
    each.name: each for each in (Synchronous, StaleSynchronous, LocalSGD, AdaComm, Gaia, DeepCompression, Adsp)
}
ALIASES = {
    "bsp": "synchronous", "sync": "synchronous", "ssp": "stale-synchronous", "fedavg": "local-sgd",
    "local-steps": "local-sgd", "deep-gradient-compression": "dgc",
}  # fmt: skip


def parse(text: str) -> SyncPolicy:
    """Return a policy from its name and key=value words. Raises ForetraceError for what is no policy, or out
    of range.
    """
    name, *words = text.split() or ("",)
    found = chosen(name, POLICIES, f"there is no policy {name!r}", ALIASES)
    kind = POLICIES[found]
    kinds = {each.name: str(each.type) for each in fields(kind)}
    given = {}
    for key, value in keyed(words, kinds, found).items():
        try:
            given[key] = int(value) if kinds[key] == "int" else float(value)
        except ValueError:
            what = "a whole number" if kinds[key] == "int" else "a number"
            raise ForetraceError(f"{key} of {found} must be {what}, got {value}; write {key}=8.") from None
    return kind(**given)
