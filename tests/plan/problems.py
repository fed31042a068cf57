"""Small problems for the tests of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretrace.cost.network.network import CollectiveKind, Cost, Network
from foretrace.cost.network.parse import network
from foretrace.plan.problem import CoarseStep


@dataclass(frozen=True, kw_only=True)
class Table(Network):
    """A network that is no straight line: small messages cost the same."""

    latency_ns: int = 30
    bytes_per_ns: float = 1.0
    flat_below: int = 0
    name: str = "table"
    workers: int = 2
    in_flight: int = 1

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        seconds = (self.latency_ns + max(nbytes, self.flat_below) / self.bytes_per_ns) / 1e9
        return Cost(seconds=seconds, low_s=seconds, high_s=seconds, why="made up")


def problem(
    backward: list[int],
    nbytes: list[int],
    *,
    forward: list[int] | None = None,
    cut: list[int] | None = None,
    update: list[int] | None = None,
    **fields: Any,
) -> CoarseStep:
    """A problem in which the forward pass needs the tensors in the reverse order of the backward pass."""
    n = len(nbytes)
    column = {"forward_ns": forward or [0] * n, "update_ns": update or [0] * n, "backward_ns": backward}
    given: dict[str, Any] = {"first_ns": 0, "last_ns": 0, "rest_ns": 0, "network": Table(), **fields}
    columns: dict[str, Any] = {key: np.array(value, dtype=np.int64) for key, value in column.items()}
    return CoarseStep(
        name="test",
        **columns,
        forward_place=np.arange(n, dtype=np.int64)[::-1].copy(),
        nbytes=np.array(nbytes, dtype=np.int64),
        cut_ns=np.array(cut or [0] * (n - 1), dtype=np.int64),
        tensors=tuple(f"t{i}" for i in range(n)),
        **given,
    ).checked()


@st.composite
def problems(draw: st.DrawFn, *, most: int = 7, cuts: bool = True, slots: int = 3) -> CoarseStep:
    """Random problems small enough to try every plan; times are small so that ties happen."""
    n = draw(st.integers(1, most))

    def column(high: int, low: int = 0, count: int = n) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    net = Table(
        latency_ns=draw(st.integers(0, 30)), bytes_per_ns=draw(st.sampled_from([0.5, 1.0, 4.0])),
        flat_below=draw(st.sampled_from([0, 0, 20])),
    )  # fmt: skip
    return problem(
        column(40),
        column(60, low=1),
        forward=column(20),
        cut=column(15, count=n - 1) if cuts and draw(st.booleans()) else [0] * (n - 1),
        update=column(5),
        first_ns=draw(st.integers(0, 5)),
        last_ns=draw(st.integers(0, 20)),
        rest_ns=draw(st.integers(0, 5)),
        network=net,
        slots=draw(st.integers(1, slots)),
    )


@st.composite
def plans(draw: st.DrawFn, n: int, *, ahead: bool | None = None) -> Any:
    """Any plan for n tensors."""
    from foretrace.plan.problem import Plan

    inner = sorted(draw(st.sets(st.integers(0, n - 2), max_size=n - 1))) if n > 1 else []
    ends = (*inner, n - 1)
    chunks = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=len(ends), max_size=len(ends)))
    return Plan(ends=ends, chunks=tuple(chunks), ahead=draw(st.booleans()) if ahead is None else ahead)


__all__ = ["Table", "network", "plans", "problem", "problems"]
