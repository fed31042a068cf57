"""How the cores of a machine are split among instances of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from foretrace.errors import ForetraceError

_GROUP = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3}):([1-9]\d{0,5})")


class ModelInstance(NamedTuple):
    """One copy of a model: on so many cores, with so many samples of every batch."""

    threads: int
    batch: int


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """A multiset of instances that share a batch, those with most threads first."""

    instances: tuple[ModelInstance, ...]

    def __post_init__(self) -> None:
        if not self.instances or min(map(min, self.instances)) < 1:
            raise ForetraceError("a split must have an instance, each with a thread and a sample at least.")
        object.__setattr__(self, "instances", tuple(sorted(self.instances, reverse=True)))

    @classmethod
    def parse(cls, text: str) -> CoreSplit:
        """From "2x1:4+1x2:8": two instances with 1 thread and batch 4, one with 2 threads and batch 8."""
        found: list[ModelInstance] = []
        for part in text.split("+"):
            match = _GROUP.fullmatch(part.strip())
            if match is None:
                raise ForetraceError(
                    f"a split must be INSTANCESxTHREADS:BATCH, joined by +, got {text[:80]!r}; write 2x1:4 for two "
                    "instances with 1 thread and batch 4."
                )
            count, threads, batch = map(int, match.groups())
            found += [ModelInstance(threads, batch)] * count
        return cls(tuple(found))

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        groups = ((each, len(list(group))) for each, group in groupby(self.instances))
        return "+".join(f"{count}x{each.threads}:{each.batch}" for each, count in groups)

    def __len__(self) -> int:
        return len(self.instances)

    @property
    def threads(self) -> int:
        """Threads of all instances; others of the machine are idle."""
        return sum(each.threads for each in self.instances)

    @property
    def batch(self) -> int:
        """Samples of all instances."""
        return sum(each.batch for each in self.instances)
