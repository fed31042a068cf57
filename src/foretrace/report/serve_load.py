"""What `foretrace serve load` answers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from foretrace.report.blocks import Block, Column, Line, table
from foretrace.report.units import count, digits, seconds
from foretrace.report.views import Result, taken
from foretrace.serving.server.load import LoadResult

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_LATE = 0.1  # of the median latency: from then on the generator is part of what it measures


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from when a request was due to its answer; null where nothing was answered."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None
    max: float | None


class ServeLoadView(Result, frozen=True, kw_only=True):
    """`foretrace serve load`: what became of requests."""

    command: str = "serve load"
    headline: str
    url: str
    model: str
    arrivals: str  # constant, poisson, diurnal, or the file
    clients: int  # of a closed loop; 0: open
    samples: int  # of a request
    seconds: float
    sent: int
    statuses: dict[str, int]  # 200 is an answer
    answers_per_s: float
    latency_s: LatencyView
    late_s: float  # 99th percentile of how late requests were sent
    ok: bool  # whether all were answered

    def shown(self, top: int) -> Iterator[Block]:
        found = self.latency_s
        values = (found.mean, found.p50, found.p90, found.p99, found.p999, found.max)
        yield table(["latency", Column("", "time")], list(zip(("mean", *QUANTILES, "largest"), values, strict=True)))
        for status, number in self.statuses.items():
            if status != "200":
                yield Line(f"{count(number)} requests: {status}", label="refused")
        if found.p50 is not None and self.late_s > _LATE * found.p50:
            yield Line(
                f"1 % of the requests were sent {seconds(self.late_s)} late or more, which the latencies hold: this "
                "machine did not keep up", label="note",
            )  # fmt: skip


def loaded(found: LoadResult, *, url: str, arrivals: str, clients: int, samples: int) -> ServeLoadView:
    """Return the view of one run."""
    times = found.latency_s
    good = len(times)
    p50, p90, p99, p999 = np.quantile(times, list(QUANTILES.values())).tolist() if good else [None] * len(QUANTILES)
    rate = good / found.seconds if found.seconds else 0.0
    tail = "" if p50 is None or p99 is None else f", half of them within {seconds(p50)} and 99 % within {seconds(p99)}"
    answered = f"{count(good)} of {count(found.sent)} requests"
    latency_s = LatencyView(
        mean=float(times.mean()) if good else None, p50=p50, p90=p90, p99=p99, p999=p999,
        max=float(times[-1]) if good else None,
    )  # fmt: skip
    return taken(
        ServeLoadView, found, headline=f"{found.model} answered {answered}, {digits(rate)} per second{tail}.", url=url,
        arrivals=arrivals, clients=clients, samples=samples, statuses=dict(sorted(found.statuses.items())),
        answers_per_s=rate, latency_s=latency_s, ok=good == found.sent,
    )  # fmt: skip
