"""`Limit`: what latency a service has promised, e.g. "ttft.p99=0.5s tpot.p99=50ms"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foretrace.errors import ForetraceError
from foretrace.names import keyed

LATENCIES = {
    "ttft": "first token", "tpot": "per output token", "itl": "between tokens", "e2e": "whole answer",
}  # fmt: skip
STATISTICS = ("p50", "p90", "p99", "mean")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_TIME = re.compile(r"(?P<number>[\d.]+(e-?\d+)?)(?P<unit>s|ms|us|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A latency must be at most this. `of` says which statistic of it, of STATISTICS."""

    latency: str  # of LATENCIES
    of: str
    seconds: float

    @property
    def name(self) -> str:
        """As in "ttft.p99"."""
        return f"{self.latency}.{self.of}"


def limits(text: str) -> tuple[Limit, ...]:
    """Return limits from NAME[.STATISTIC]=TIME, several with spaces; without a statistic it is p99. Raises
    ForetraceError.
    """
    known = [*LATENCIES, *(f"{latency}.{of}" for latency in LATENCIES for of in STATISTICS)]
    found = []
    words = text.lower().split()
    if bare := next((each for each in words if "=" not in each), ""):
        raise ForetraceError(f"`slo=`: {bare!r} is no limit; write ttft.p99=0.5s or tpot=50ms.")
    for name, value in keyed(words, known, "`slo=`").items():
        match = _TIME.fullmatch(value)
        try:
            seconds = float(match["number"]) * _UNITS[match["unit"]] if match else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e9:
            raise ForetraceError(
                f"`slo=`: {name}={value} must be a time above 0; write e.g. {name}=0.5s or {name}=50ms."
            )
        latency, _, of = name.partition(".")
        found.append(Limit(latency=latency, of=of or "p99", seconds=seconds))
    return tuple(found)
