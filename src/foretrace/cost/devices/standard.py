"""The chain of cost models that commands use where the user names none."""

from __future__ import annotations

from collections.abc import Sequence

from foretrace.cost.devices.attention import FusedAttention
from foretrace.cost.devices.learned import Learned
from foretrace.cost.devices.roofline import Roofline
from foretrace.cost.model import Chain, CostModel


def standard(first: Sequence[CostModel] = ()) -> Chain:
    """`first`, e.g. measured ones, then the learned ones, fused attention, and the roofline, which knows every call."""
    return Chain(members=(*first, Learned(), FusedAttention(), Roofline()))
