"""`Acceptance`: how many of the tokens that a draft proposes a target accepts (speculative decoding).

S(i) is the probability that the first i proposals of a round are accepted. A round of k proposals emits

    tau(k) = 1 + S(1) + ... + S(k)

tokens: those accepted and one of the target's own. With the same rate a for every proposal S(i) = a^i, so tau is
(1 - a^(k+1)) / (1 - a) (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, eq. 1).
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

    A rate is taken for every proposal. Counts are rounds that accepted 0, 1, ..., K of K proposals; behind those the
    last share continues, with a range from none to all.
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
        """Return s(k): the probability that k proposals are all accepted."""
        if not self.counts:
            return self.rate**k
        known = self._survivals()
        last = known[-1] / known[-2] if len(known) > 1 and known[-2] else known[-1]
        return known[k] if k < len(known) else known[-1] * last ** (k - len(known) + 1)

    def survivals(self, k: int, end: int = 0) -> tuple[float, ...]:
        """Return s(1), ..., S(k); `end`: -1 and 1 are those at the ends of the range of tau(k)."""
        tau = self.tokens(k)
        if not self.counts:
            rate = (self.low, self.rate, self.high)[end + 1]
            return tuple(rate**i for i in range(1, k + 1))
        more = ((tau.low, tau.value, tau.high)[end + 1] - 1) / max(tau.value - 1, 1e-12)
        return tuple(min(more * self.survival(i), 1.0) for i in range(1, k + 1))

    def tokens(self, k: int) -> Prior:
        """Return tau(k), the tokens that a round emits, with its range. Raises ForetraceError for k below 1 or above
        64.
        """
        checked_k(k)
        value = 1 + sum(self.survival(i) for i in range(1, k + 1))
        if not self.counts:
            low, high = (sum(rate**i for i in range(k + 1)) for rate in (self.low, self.high))
            return Prior(value, low, high, unit="tokens", why=f"acceptance {self.low:.2g} to {self.high:.2g} of each")
        n, measured = sum(self.counts), len(self.counts) - 1
        kept = np.minimum(np.arange(measured + 1), k)
        counts = np.array(self.counts, float)
        mean = float(counts @ kept) / n
        spread = _Z80 * sqrt(max(float(counts @ (kept - mean) ** 2) / n, 0.25) / (_INDEPENDENT * n))
        beyond = max(k - measured, 0) * self._survivals()[-1]
        return Prior(value, max(1 + mean - spread, 1.0), min(1 + mean + spread + beyond, 1.0 + k), unit="tokens",
                     why=f"{n} measured rounds")  # fmt: skip

    def _survivals(self) -> list[float]:
        n = sum(self.counts)
        return [sum(self.counts[i:]) / n for i in range(len(self.counts))]


def checked_k(k: int) -> None:
    """Raise ForetraceError for a number of proposals that no round has."""
    if k < 1:
        raise ForetraceError(f"k={k} proposes nothing, which is decoding without a draft; give 1 or more.")
    if k > MOST:
        raise ForetraceError(f"k={k} must be at most {MOST}; nobody accepts so many tokens in a row.")
