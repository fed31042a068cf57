"""What a network says of collectives as recordings name them."""

from __future__ import annotations

from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.simulate.transfers import Price

# PyTorch's words. NCCL's SendRecv kernel among a whole group is an all-to-all; a barrier is the smallest all-reduce.
KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "send_recv": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.REDUCE,
    "scatter": CollectiveKind.BROADCAST,
    "barrier": CollectiveKind.ALL_REDUCE,
}
_LEAST_BYTES = 4.0  # what a barrier sends


def price(network: Network) -> Price:
    """Seconds, low and high end of a collective on this network; None for a kind that it does not know."""

    def priced(kind: str, nbytes: float, workers: int) -> tuple[float, float, float] | None:
        known = KINDS.get(kind)
        if known is None:
            return None
        cost = network.cost(known, max(nbytes, _LEAST_BYTES), workers=workers)
        return cost.seconds, cost.low_s, cost.high_s

    return priced
