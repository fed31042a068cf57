"""The loops of `training.rows.neighbours` in plain Python: readable, equal bit for bit, nothing shared."""

from __future__ import annotations

from collections.abc import Sequence


def draw(begins: Sequence[int], sizes: Sequence[int], wanted: Sequence[int], uniform: Sequence[float]) -> list[int]:
    found: list[int] = []
    numbers = iter(uniform)
    for begin, size, count in zip(begins, sizes, wanted, strict=True):
        drawn = [next(numbers) for _ in range(count)]
        chosen = list(range(size)) if count == size else []
        if not chosen:
            for last, u in zip(range(size - count, size), drawn, strict=True):
                one = int(u * (last + 1))
                chosen.append(last if one in chosen else one)
        found += [begin + each for each in chosen]
    return found


def place(kept: list[int], slots: Sequence[int], fresh: Sequence[int]) -> None:
    """For one node, all of whose neighbours are `kept`."""
    for slot, node in zip(slots, fresh, strict=True):
        if node in kept and len(slots) < len(kept):
            kept[kept.index(node)] = kept[slot]
        kept[slot] = node


def relabel(nodes: Sequence[int], n_id: list[int]) -> list[int]:
    for node in nodes:
        if node not in n_id:
            n_id.append(node)
    return [n_id.index(node) for node in nodes]
