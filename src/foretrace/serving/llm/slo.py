"""`Limit`: what latency a service has promised, e.g. "ttft.p99=0.5s tpot.p99=50ms"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foretrace.errors import ForetraceError
from foretrace.names import question

LATENCIES = {
    "ttft": "first token", "tpot": "per output token", "itl": "between tokens", "e2e": "whole answer",
}  # fmt: skip
STATISTICS = ("p50", "p90", "p99", "mean")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_LIMIT = re.compile(r"(?P<name>\w+)(\.(?P<of>\w+))?=(?P<number>[\d.]+(e-?\d+)?)(?P<unit>[a-z]*)")


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
    """Limits from NAME[.STATISTIC]=TIME, several with spaces; without a statistic it is p99. Raises ForetraceError."""
    found = []
    for word in text.split():
        match = _LIMIT.fullmatch(word.lower())
        if match is None or match["unit"] not in _UNITS:
            raise ForetraceError(f"`slo=`: {word!r} is no limit; write e.g. ttft.p99=0.5s or tpot=50ms.")
        if match["name"] not in LATENCIES:
            raise ForetraceError(f"`slo=`: there is no {match['name']!r}; {question(match['name'], LATENCIES)}")
        of = match["of"] or "p99"
        if of not in STATISTICS:
            raise ForetraceError(f"`slo=`: there is no {of!r} of a latency; {question(of, STATISTICS)}")
        try:
            seconds = float(match["number"]) * _UNITS[match["unit"]]
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e9:
            raise ForetraceError(f"`slo=`: {word!r} must be a time above 0.")
        found.append(Limit(latency=match["name"], of=of, seconds=seconds))
    return tuple(found)
