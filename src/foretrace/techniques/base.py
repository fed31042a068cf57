"""`Technique`: a named optimisation that turns a task graph into the one it would lead to, and a training into the real
thing.

A technique is a frozen dataclass. Its fields are its parameters: `parameter` for what the user decides,
`prior` for a number that the recording does not give. A prior is `None` until the user replaces it; until
then the technique works with the central value and `predict` records the plausible range as an `Assumption`.
"""

from __future__ import annotations

import operator
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from functools import cache
from math import isfinite
from typing import Any, ClassVar, Literal

from foretrace.cost.operators.operator import Operator
from foretrace.errors import CycleError, NotApplicableError
from foretrace.graph.sound import sound
from foretrace.graph.taskgraph import Assumption, TaskGraph
from foretrace.techniques.each_rank import first_rank, on_each_rank
from foretrace.techniques.settle import settle
from foretrace.training.training import Training

CONTRADICTS = "the order in this recording contradicts the change"
Across = Literal["", "each", "all"]
Larger = Literal["slower", "faster"]
MOST, MOST_RATE = 1e9, 1e12  # of a time or factor (1000 s in µs: more leaves what a graph can hold), of a rate


@dataclass(frozen=True, slots=True)
class Prior:
    """What is plausible for a number before anyone measured it: central value and 80 % range, written as `prior`."""

    value: float
    low: float
    high: float
    _: KW_ONLY
    unit: str = "×"
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Between which values a number makes sense, and what to say beside that where it lies outside."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    hint: str = ""

    def broken(self, value: float) -> str:
        """Return what a value must be, as in "above 0 and at most 1"; "" where it is that."""
        kept = (
            (self.least, "{:,.0f} or more", operator.ge), (self.above, "above {:,.0f}", operator.gt),
            (self.most, "at most {:,.0f}", operator.le), (self.below, "below {:,.0f}", operator.lt),
        )  # fmt: skip
        given = [(end, words, holds) for end, words, holds in kept if end is not None]
        if all(holds(value, end) for end, _, holds in given) and isfinite(value):
            return ""
        return " and ".join(words.format(end) for end, words, _ in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a technique, for listings and for reading arguments."""

    name: str  # as it is written: `key=value`
    field: str  # as Python calls it; differs from `name` only where that is taken
    type: str  # "float", "int", "bool", "str"
    doc: str
    unit: str
    default: Any  # None where there is none or where a prior stands in
    required: bool
    choices: tuple[str, ...]
    prior: Prior | None
    larger_is: Larger = "slower"  # what a larger value does to the step, where it matters


def parameter(
    default: Any = MISSING, *, doc: str, unit: str = "", choices: tuple[str, ...] = (), key: str = "", **limits: Any
) -> Any:
    """Return a field that the user sets; required where it has no default.

    `key` is its name in text, if another. `limits` are those of `_Limits`: a technique outside of them is not made.
    """
    made = _Limits(**limits) if limits else None
    return field(default=default, metadata={"doc": doc, "unit": unit, "choices": choices, "key": key, "limits": made})


def prior(
    value: float, low: float, high: float, *, doc: str, why: str, unit: str = "×", larger_is: Larger | None = None
) -> Any:
    """Return a field for a number that the recording does not give; `why` says where the range comes from.

    `larger_is` says what a larger value does to the step: slower, unless it is a rate.
    """
    stands_in = Prior(value, low, high, unit=unit, why=why)
    return field(default=None, metadata=_stated(doc, unit, larger_is) | {"choices": (), "prior": stands_in})


def derived(*, doc: str, unit: str = "×", larger_is: Larger | None = None) -> Any:
    """Return a field whose prior depends on the recording; `priors` of the technique works it out."""
    return field(default=None, metadata=_stated(doc, unit, larger_is))


def _stated(doc: str, unit: str, larger_is: Larger | None) -> dict[str, Any]:
    larger_is = larger_is or ("faster" if unit == "GB/s" else "slower")
    ends = {"most": 1.0} if unit == "share" else {"most": MOST_RATE if larger_is == "faster" else MOST}
    lowest = "above" if larger_is == "faster" and unit != "share" else "least"
    limits = _Limits(**{lowest: 0.0}, **ends, hint="or leave it out")
    return {"doc": doc, "unit": unit, "larger_is": larger_is, "limits": limits}


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """Base of all techniques.

    Subclasses set the class variables and write `change` and, where there is a real thing, `realise`.
    """

    name: ClassVar[str]  # that of the class, as it is written: PrefetchData is "prefetch-data"
    summary: ClassVar[str]  # one line
    source: ClassVar[str]  # paper and section, or documentation, that the rule comes from
    effort: ClassVar[str] = ""  # what it costs to do, in a few words: lines to write, memory, numerics
    needs: ClassVar[str] = ""  # what the real thing needs beside PyTorch: "a CUDA device", "a C++ compiler"
    not_applied: ClassVar[str] = ""  # why the real thing cannot be had by software, where it cannot
    # On the graph of several ranks: "all" is right on the whole, "each" on every rank alone, "" on one rank only.
    across: ClassVar[Across] = ""
    repeats: ClassVar[bool] = False  # whether it changes something once more where it was applied before

    def __init_subclass__(cls) -> None:
        if "summary" in vars(cls) and not hasattr(cls, "name"):  # what several share has no summary
            cls.name = re.sub(r"(?<=.)([A-Z])", r"-\1", cls.__name__).lower()

    def __post_init__(self) -> None:
        """Refuse what is no choice, and what lies outside of its limits: an assumption below 0, or a rate of 0."""
        for each in fields(self):
            value, limits, choices = getattr(self, each.name), each.metadata.get("limits"), each.metadata.get("choices")
            if choices and value is not None and value not in choices:
                raise self.refuse(f"{each.name}={value} is not one of {', '.join(filter(None, choices))}.")
            if limits is not None and value is not None and (wanted := limits.broken(value)):
                hint = f"; {limits.hint}" if limits.hint else ""
                raise self.refuse(f"{each.name} must be {wanted}, got {value:g}{hint}.")

    @abstractmethod
    def change(self, graph: TaskGraph) -> TaskGraph:
        """Return the graph after this technique, changes noted without its name; raises NotApplicableError with a
        reason.
        """

    def predict(self, graph: TaskGraph) -> TaskGraph:
        """Return the graph after this technique, with its changes and assumptions noted. Never alters `graph`.

        What follows from the change for the run around it is part of it, see `settle`.
        Raises NotApplicableError, with a reason, where the technique does not fit.
        """
        several = len(graph.ranks) > 1
        if several and not self.across:
            raise self.refuse("it reckons with one rank, not with a graph of several; name one with `rank=`.")
        try:
            changed = on_each_rank(graph, self.signed) if several and self.across == "each" else self.signed(graph)
            if not self.repeats and any(change.technique == self.name for change in graph.changes):
                raise self.refuse("it is in this graph already; give it once.")
            return settle(graph, sound(changed), self.name).noted(assumptions=self.uncertain(graph))
        except OverflowError as error:
            raise self.refuse("its numbers lead beyond the times that a graph can hold; give smaller ones.") from error
        except CycleError as error:  # never on a recording that was built right: the cross counts it as a bug
            where = str(error).partition(" through ")[2].removesuffix(".")
            raise self.refuse(f"{CONTRADICTS}: {where} would wait for each other.") from error

    def signed(self, graph: TaskGraph) -> TaskGraph:
        """Return what `change` makes of a graph, with this technique's name under all that it noted."""
        try:
            changed, before = self.change(graph), len(graph.changes)
        except NotApplicableError as error:
            if re.match(r"[\w-]+: ", str(error)):
                raise
            raise self.refuse(str(error)) from error  # of what techniques share, which knows no name
        made = (each if each.technique else replace(each, technique=self.name) for each in changed.changes[before:])
        return replace(changed, changes=(*changed.changes[:before], *made))

    def apply(self, training: Training) -> Training:
        """Return the training with this technique for real, made from a copy; never alters `training`.

        Raises NotApplicableError, with a reason, where it does not fit or cannot be done by software.
        """
        if not self.can_apply():
            raise self.refuse(self.not_applied or "it can be predicted but not applied.")
        changed = self.realise(training.copied())
        return replace(changed, applied=(*training.applied, str(self)))

    def realise(self, training: Training) -> Training:
        """Return `training`, a copy to work on, with this technique; raises NotApplicableError with a reason."""
        raise self.refuse(self.not_applied or "it can be predicted but not applied.")

    @classmethod
    def can_apply(cls) -> bool:
        """Return whether there is a real thing: `realise` is written."""
        return cls.realise is not Technique.realise

    @property
    def period(self) -> int:
        """Steps after which those of a training with this technique repeat: it is measured over whole periods."""
        return 1

    @property
    def tries(self) -> int:
        """Steps that several workers try at the same time before a prediction (`tried`); 0 where none."""
        return 0

    def tried(self, training: Training, meet: Callable[[], object]) -> list[tuple[float, float]]:
        """Return what a worker sends in bytes, and seconds of its work for it, by exchange of `tries` steps.

        No message is carried: others answer at once. Workers `meet` before each step, so that they work together.
        """
        return []

    def with_tried(self, graph: TaskGraph, tried: Sequence[Sequence[tuple[float, float]]]) -> TaskGraph:
        """Return the graph with what each worker `tried`, where `predict` finds it."""
        return graph

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        """Return operators whose times on the recorded machine would sharpen `predict`; empty where none would."""
        return ()

    def priors(self, graph: TaskGraph) -> Mapping[str, Prior]:
        """Return priors that matter on this graph, by field; subclasses drop or sharpen them from the recording."""
        return {each.name: each.prior for each in self.parameters() if each.prior is not None}

    def uncertain(self, graph: TaskGraph) -> tuple[Assumption, ...]:
        """Return what `predict` assumes on this graph: every prior that the user has not replaced.

        On the graph of several ranks that are changed one by one, what it assumes on the lowest.
        """
        if self.across == "each" and len(graph.ranks) > 1:
            graph = first_rank(graph)
        return tuple(
            Assumption(
                technique=self.name,
                name=name.replace("_", " "),
                value=found.value,
                low=found.low,
                high=found.high,
                unit=found.unit,
                why=found.why,
                flag=name,
            )
            for name, found in self.priors(graph).items()
            if getattr(self, name) is None
        )

    def values(self, graph: TaskGraph) -> dict[str, float]:
        """Return what to reckon with on this graph: the user's value of every prior, else its central one."""
        numbers = {name: found.value for name, found in self.priors(graph).items()}
        given = {each.field: getattr(self, each.field) for each in self.parameters() if each.type == "float"}
        return numbers | {name: float(value) for name, value in given.items() if value is not None}

    def refuse(self, reason: str) -> NotApplicableError:
        """Return the error that says why this technique does not fit."""
        return NotApplicableError(f"{self.name}: {reason}")

    def __str__(self) -> str:
        """Return the technique as it is written on the command line."""
        values = ((each.name, getattr(self, each.field), each.default) for each in self.parameters())
        words = [f"{name}={value}" for name, value, default in values if value != default]
        return shlex.join([self.name, *words])

    @classmethod
    @cache
    def parameters(cls) -> tuple[Parameter, ...]:
        """Return all parameters: what the user decides, then what stands for a number, each in the order of the
        fields.
        """
        return tuple(
            Parameter(
                name=each.metadata.get("key") or each.name,
                field=each.name,
                type=getattr(each.type, "__name__", str(each.type)).removesuffix(" | None"),
                doc=each.metadata.get("doc", ""),
                unit=each.metadata.get("unit", ""),
                default=None if each.default is MISSING else each.default,
                required=each.default is MISSING,
                choices=each.metadata.get("choices", ()),
                prior=each.metadata.get("prior"),
                larger_is=each.metadata.get("larger_is", "slower"),
            )
            for each in sorted(fields(cls), key=lambda each: "larger_is" in each.metadata)
        )
