"""Whether compressing gradients pays, in closed form: the model of the Utility study, for tables over many set-ups.

Source: Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022, section 4;
equations as quoted in a second-hand summary, not checked in every detail against the paper. `foretrace compression
advise` predicts the same on a recorded task graph instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

BUCKET_BYTES = 25 * 1024 * 1024
OVERLAP = 1.07  # slow-down of a backward pass beside messages: 1.04 to 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Workers in a ring over equal links."""

    workers: int
    bytes_per_s: float
    latency_s: float = 0.0

    def all_reduce_s(self, nbytes: float) -> float:
        """Seconds of a ring all-reduce of buffers of so many bytes."""
        p = self.workers
        return 2 * self.latency_s * (p - 1) + 2 * nbytes * (p - 1) / (p * self.bytes_per_s)

    def all_gather_s(self, nbytes: float) -> float:
        """Seconds until everyone has the so many bytes of everyone."""
        return (self.workers - 1) * (self.latency_s + nbytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one worker sends of all its gradients, in total, and how long coding takes."""

    reduced: Sequence[float] = ()  # bytes of all-reduces
    gathered: Sequence[float] = ()  # bytes of all-gathers
    coding_s: float = 0.0


def synchronous_s(backward_s: float, nbytes: float, link: Link, *, overlap: float = OVERLAP) -> float:
    """Backward pass with all-reduces of 25 MiB buckets beside it; the last bucket is exposed."""
    if link.workers < 2:
        return backward_s
    buckets = max(ceil(nbytes / BUCKET_BYTES), 1)
    last = nbytes - (buckets - 1) * BUCKET_BYTES
    beside = (buckets - 1) * link.all_reduce_s(BUCKET_BYTES)
    slower = overlap if buckets > 1 else 1.0
    return max(slower * backward_s, beside) + link.all_reduce_s(last)


def compressed_s(backward_s: float, sent: Sent, link: Link) -> float:
    """Backward pass, then coding, then messages: nothing overlaps, because the encoder needs the same device."""
    if link.workers < 2:
        return backward_s
    messages = sum(link.all_reduce_s(each) for each in sent.reduced)
    messages += sum(link.all_gather_s(each) for each in sent.gathered)
    return backward_s + sent.coding_s + messages


def required_ratio(backward_s: float, nbytes: float, link: Link, *, tolerance: float = 0.05) -> float | None:
    """The smallest ratio at which free compression makes a step near-linear: within `tolerance` of the backward pass.

    1 where nothing needs to be compressed; None where latency alone takes longer than that.
    """

    def near_linear(ratio: float) -> bool:
        return synchronous_s(backward_s, nbytes / ratio, link, overlap=1.0) <= backward_s * (1 + tolerance)

    if near_linear(1.0):
        return 1.0
    low, high = 1.0, 2.0
    while not near_linear(high):
        low, high = high, 2 * high
        if high > 1e9:
            return None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if near_linear(middle) else (middle, high)
    return high
