"""The batch size that arrivals call for, estimated as Packrat does (arXiv 2311.18174, section 4, and its code)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrace.serving.server.dispatcher import Dispatcher
from foretrace.serving.server.split import CoreSplit

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


async def follow_load(dispatcher: Dispatcher, splits: Mapping[int, CoreSplit], every_s: float) -> None:
    """Estimate the batch size, and every so many seconds change to the split that is best for it; without end.

    `splits` by batch size; the next larger one stands for a size that is missing. A split that cannot start is reported
    in the log and tried again.
    """
    estimator, loop = BatchEstimator(), asyncio.get_running_loop()
    due = loop.time() + every_s
    while True:
        await asyncio.sleep(SAMPLE_S)
        estimator.sample(dispatcher.waiting + dispatcher.running)
        if loop.time() < due:
            continue
        due = loop.time() + every_s
        best = splits[min((each for each in splits if each >= estimator.batch), default=max(splits))]
        if dispatcher.active is not None and best != dispatcher.active.split and not dispatcher.changing:
            changing = asyncio.ensure_future(dispatcher.reconfigure(best))
            while not changing.done():
                await asyncio.wait({changing}, timeout=SAMPLE_S)
                estimator.sample(dispatcher.waiting + dispatcher.running)
            if (error := changing.exception()) is not None:
                logging.getLogger(__name__).warning("the split stays: %s", error)
