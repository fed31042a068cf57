"""`Acceptance`: how many of the tokens that a draft proposes a target accepts (speculative decoding).

S(i) is the probability that the first i proposals of a round are accepted. A round of k proposals emits

    tau(k) = 1 + S(1) + ... + S(k)

tokens: those accepted and one of the target's own. With the same rate a for every proposal S(i) = a^i, so tau is
(1 - a^(k+1)) / (1 - a) (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, eq. 1).

What is accepted comes in runs: text that a draft knows and text that it does not. Rounds of many proposals begin behind
a rejection most of the time, those of few also within runs. So counts of rounds of K proposals are cut again for a
smaller k (`Acceptance.rounds_of`); their own S(1) would be too low.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.techniques.base import Prior

MOST = 64  # proposals of a round
#: How far a rate may be off that was measured elsewhere or on other text. Rates of one pair of models differ so much
#: between tasks and temperatures (Leviathan et al., table 3: from 0.53 to 0.75 for one of them).
ELSEWHERE = 0.1
#: Rounds of one text are alike: counts are taken as if so large a share of them were independent.
_INDEPENDENT = 0.25
_Z80 = 1.2816  # of a normal distribution, 80 % two-sided
_HOW = "write a rate (0.7), a range (0.6-0.8), or how many rounds accepted 0, 1, ... tokens (30/12/8/50)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a target accepts: its middle, and the ends of an 80 % range.

    A rate is taken for every proposal. Counts are rounds that accepted 0, 1, ..., K of K proposals: runs of accepted
    tokens, which rounds of fewer proposals cut otherwise; behind K the last share continues, with a range from none to
    all.
    """

    rate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str | float) -> Acceptance:
        """Parse text, as `_HOW` says. Raises ForetraceError."""
        words = str(text).strip()
        try:
            if "/" in words:
                counts = tuple(int(each) for each in words.split("/"))
                if min(counts) >= 0 and max(counts) and 2 <= len(counts) <= MOST + 1:
                    return cls(counts=counts)
                raise ValueError
            ranged = re.fullmatch(r"([\d.]+)-([\d.]+)", words)
            ends = [float(each) for each in (ranged.groups() if ranged else (words,))]
            if not all(isfinite(each) and 0 <= each <= 1 for each in ends):
                raise ValueError
        except ValueError:
            raise ForetraceError(f"acceptance={words} must be shares from 0 to 1, or counts; {_HOW}.") from None
        if ranged:
            return cls(rate=sum(ends) / 2, low=min(ends), high=max(ends))
        (rate,) = ends
        return cls(rate=rate, low=max(rate - ELSEWHERE, 0.0), high=min(rate + ELSEWHERE, 1.0))

    def survival(self, k: int) -> float:
        """Return S(k) in rounds of k: the probability that all proposals are accepted."""
        return self._survivals(k)[-1] if k else 1.0

    def survivals(self, k: int, end: int = 0) -> tuple[float, ...]:
        """Return S(1), ..., S(k) in rounds of k; `end`: -1 and 1 are those at the ends of the range of tau(k)."""
        if not self.counts:
            rate = (self.low, self.rate, self.high)[end + 1]
            return tuple(rate**i for i in range(1, k + 1))
        tau = self.tokens(k)
        more = ((tau.low, tau.value, tau.high)[end + 1] - 1) / max(tau.value - 1, 1e-12)
        return tuple(min(more * each, 1.0) for each in self._survivals(k))

    def tokens(self, k: int) -> Prior:
        """Return tau(k), the tokens that a round emits, with its range. Raises ForetraceError for k below 1 or above
        64.
        """
        checked_k(k)
        value = 1 + sum(self._survivals(k))
        if not self.counts:
            low, high = (sum(rate**i for i in range(k + 1)) for rate in (self.low, self.high))
            return Prior(value, low, high, unit="tokens", why=f"acceptance {self.low:.2g} to {self.high:.2g} of each")
        n, counts = sum(self.counts), np.array(self.rounds_of(k))
        shares, kept = counts / counts.sum(), np.arange(len(counts))
        mean = float(shares @ kept)
        spread = _Z80 * sqrt(max(float(shares @ (kept - mean) ** 2), 0.25) / (_INDEPENDENT * n))
        beyond = max(k + 1 - len(counts), 0) * self._survivals(len(counts) - 1)[-1]
        return Prior(value, max(1 + mean - spread, 1.0), min(1 + mean + spread + beyond, 1.0 + k), unit="tokens",
                     why=f"{n} measured rounds")  # fmt: skip

    def rounds_of(self, k: int) -> tuple[float, ...]:
        """Return how many rounds of k proposals, or of as many as were counted, accept 0, 1, ... on the same text.

        A run of n accepted tokens and the token that ends it is cut into pieces of k + 1, of which the last may be
        shorter; a run that outlasts its round, which is known to K + 1 tokens, into (K + 1) / (k + 1) full ones. Text
        behind a run is taken not to depend on how rounds cut it.
        """
        if k + 1 >= len(self.counts):
            return tuple(map(float, self.counts))
        found = [0.0] * (k + 1)
        for length, runs in enumerate(self.counts[:-1]):
            full, rest = divmod(length, k + 1)
            found[k] += full * runs
            found[rest] += runs
        found[k] += self.counts[-1] * len(self.counts) / (k + 1)
        return tuple(found)

    def _survivals(self, k: int) -> list[float]:
        """Return S(1), ..., S(k) in rounds of k."""
        if not self.counts:
            return [self.rate**i for i in range(1, k + 1)]
        counts = self.rounds_of(k)
        known = [sum(counts[i:]) / sum(counts) for i in range(len(counts))]
        last = known[-1] / known[-2] if known[-2] else known[-1]
        return [known[i] if i < len(known) else known[-1] * last ** (i - len(known) + 1) for i in range(1, k + 1)]


def checked_k(k: int) -> None:
    """Raise ForetraceError for a number of proposals that no round has."""
    if k < 1:
        raise ForetraceError(f"k={k} proposes nothing, which is decoding without a draft; give 1 or more.")
    if k > MOST:
        raise ForetraceError(f"k={k} must be at most {MOST}; nobody accepts so many tokens in a row.")
