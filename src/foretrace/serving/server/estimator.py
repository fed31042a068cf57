"""The batch size that arrivals call for, estimated as Packrat does (arXiv 2311.18174, section 4, and its code)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

SAMPLE_S = 0.005
_KEPT = 0.9  # of the average, at every sample
_CANDIDATES = 10


@dataclass
class BatchEstimator:
    """Samples the queue every SAMPLE_S: x = 0.9 x + 0.1 q; the candidate is the largest power of two up to x, rounded.

    The queue holds what waits and what runs: without the second, a batch that is taken would look like a load that
    went away.
    """

    average: float = 0.0
    candidates: deque[int] = field(default_factory=lambda: deque(maxlen=_CANDIDATES))

    def sample(self, queued: int) -> None:
        """Take one reading of the queue, in samples."""
        self.average = _KEPT * self.average + (1 - _KEPT) * queued
        self.candidates.append(1 << max(round(self.average).bit_length() - 1, 0))

    @property
    def batch(self) -> int:
        """The mode of the last candidates, the oldest of several; 1 before the first reading."""
        return Counter(self.candidates).most_common(1)[0][0] if self.candidates else 1
