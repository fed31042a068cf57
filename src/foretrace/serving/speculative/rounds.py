"""What rounds of speculative decoding take and emit: speed-up, best k, and where it starts to hurt.

A round of k proposals takes

    k draft(n) + S(k) catch_up + verify(n, k + 1)

for a batch of n sequences, and emits tau(k) tokens of each (Yan et al., Decoding Speculative Decoding, 2024, section
3). Where all proposals were accepted the draft has to read one token more, its own last one. Without a draft a token
takes verify(n, 1). A sequence continues as far as it came, so tokens average over the batch; what differs from batch to
batch is how long it takes to verify n (k + 1) tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from foretrace.errors import ForetraceError
from foretrace.techniques.compute.acceptance import Acceptance, checked_k

MOST_K = 16  # that a search looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Seconds of the parts of a round, for one batch and context. Ranges are factors, 80 %.

    `verify_s[m - 1]` is a pass of the target over m tokens of each sequence.
    """

    verify_s: tuple[float, ...]
    draft_s: float  # a pass of the draft over one token of each sequence
    catch_up_s: float = 0.0  # more for a pass over two tokens
    batch: int = 1
    low: float = 1.0  # of the draft against the target
    high: float = 1.0
    verify_low: float = 1.0  # of verifying several tokens against verifying one
    verify_high: float = 1.0

    @property
    def plain_s(self) -> float:
        """Seconds per token of a sequence without a draft."""
        return self.verify_s[0]

    def round_seconds(self, k: int, accepted: Acceptance, end: int = 0) -> float:
        """Return seconds of a round; `end`: -1 and 1 are the ends of the range, 0 its middle."""
        if k >= len(self.verify_s):
            raise ForetraceError(
                f"`k={k}` needs the time of verifying {k + 1} tokens, and {len(self.verify_s)} are known; measure more."
            )
        own, grown = ((self.low, 1.0, self.high)[end + 1], (self.verify_low, 1.0, self.verify_high)[end + 1])
        verify = self.verify_s[0] + (self.verify_s[k] - self.verify_s[0]) * grown
        return verify + own * (k * self.draft_s + accepted.survival(k) * self.catch_up_s)


class Speculated(msgspec.Struct, frozen=True, kw_only=True):
    """One k: what a round emits and takes, and the speed-up over decoding without a draft, with its 80 % range."""

    k: int
    tau: float
    tau_low: float
    tau_high: float
    round_s: float
    tokens_per_s: float  # of the whole batch
    speedup: float
    speedup_low: float
    speedup_high: float


def speculated(times: RoundTimes, accepted: Acceptance, k: int) -> Speculated:
    """Return what rounds of k proposals do. Raises ForetraceError for a k that cannot be."""
    tau = accepted.tokens(k)
    middle, quick, slow = (times.round_seconds(k, accepted, end) for end in (0, -1, 1))
    return Speculated(
        k=k, tau=tau.value, tau_low=tau.low, tau_high=tau.high, round_s=middle,
        tokens_per_s=times.batch * tau.value / middle, speedup=tau.value * times.plain_s / middle,
        speedup_low=tau.low * times.plain_s / slow, speedup_high=tau.high * times.plain_s / quick,
    )  # fmt: skip


def best(times: RoundTimes, accepted: Acceptance) -> Speculated:
    """Return the k with the largest speed-up, as far as times of verifying are known. Raises ForetraceError without
    any.
    """
    most = min(MOST_K, len(times.verify_s) - 1)
    if most < 1:
        raise ForetraceError("no k can be chosen: only the time of one token is known; measure verifying several.")
    return max((speculated(times, accepted, k) for k in range(1, most + 1)), key=lambda each: each.speedup)


def break_even_draft_s(times: RoundTimes, accepted: Acceptance, k: int) -> float:
    """Return how fast a draft must be: seconds of a pass at which rounds of k gain nothing; below 0: none is."""
    checked_k(k)
    tau = accepted.tokens(k).value
    rest = times.round_seconds(k, accepted) - k * times.draft_s
    return (tau * times.plain_s - rest) / k


def break_even_batch(
    times_of: Callable[[int], RoundTimes], accepted: Acceptance, k: int, batches: Sequence[int]
) -> int | None:
    """Return from which of these batches on rounds of k proposals hurt; None where they never do."""
    hurts = None
    for batch in sorted(batches, reverse=True):
        if speculated(times_of(batch), accepted, k).speedup > 1:
            return hurts
        hurts = batch
    return hurts
