"""Rewrite rules that TASO's generator published (`graph_subst.pb`, Jia et al., SOSP 2019), read and made into rules.

The file is a protocol buffer: a collection {1: rule}; rule {1: source operator, 2: target operator, 3: output map};
operator {1: type, 2: input tensor, 3: parameter}; tensor {1: operator, 2: output}; parameter {1: key, 2: value}; output
map {1: source operator, 2: target operator, 3: source output, 4: target output}. A tensor of an operator below zero is
an input of the pattern, the same number being the same tensor on both sides. No rule is used before it was held
against numbers (`patterns.as_rule` gives it random examples, `verifier.verify` compares).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.model.readers.protobuf import Wire, fields, signed

KINDS = {3: "conv2d", 8: "relu", 12: "concat", 13: "split", 16: "add", 17: "mul", 18: "matmul"}
ACTS = {0: "", 2: "relu"}


@dataclass(frozen=True, kw_only=True)
class Ref:
    """A tensor of a pattern: output `out` of operator `op`, or input number −`op` where `op` is below zero."""

    op: int
    out: int


@dataclass(frozen=True, kw_only=True)
class PatternOp:
    """One operator of a pattern."""

    kind: str
    inputs: tuple[Ref, ...]
    kernel: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    same: bool = True  # padding so that stride alone makes images smaller
    act: str = ""
    rank: int = 0  # of a concatenation or split, 0 where the rule does not say
    axis: int = 0
    outputs: int = 1


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A source, what it may be replaced by, and which outputs are equal: (source ref, target ref)."""

    name: str
    source: tuple[PatternOp, ...]
    target: tuple[PatternOp, ...]
    outputs: tuple[tuple[Ref, Ref], ...]


def read(path: Path) -> tuple[Pattern, ...]:
    """Return the rules of a file. Raises ForetraceError where it cannot be read, or holds what no rule could mean."""
    data = reading.read_bytes(path, mend="give TASO's file")
    try:
        found = parse(data)
    except ForetraceError as error:
        raise ForetraceError(f"{path} is no file of rewrite rules: {error}") from None
    if not found:
        raise ForetraceError(f"{path} holds no rewrite rule; give the file that TASO's generator wrote.")
    return found


def parse(data: bytes) -> tuple[Pattern, ...]:
    """Return the rules in the bytes of a collection."""
    rules = [_message(value) for number, value in fields(data) if number == 1]
    return tuple(_pattern(each, f"taso-{i}") for i, each in enumerate(rules))


def _message(value: Wire) -> bytes:
    if not isinstance(value, bytes):
        raise ForetraceError("a number stands where a message is expected; give the file as TASO wrote it.")
    return value


def _numbers(data: bytes) -> dict[int, int]:
    """Return field number -> value of a message of plain numbers."""
    return {number: signed(value) for number, value in fields(data)}


def _pattern(data: bytes, name: str) -> Pattern:
    sides: dict[int, list[PatternOp]] = {1: [], 2: []}
    maps = []
    for number, value in fields(data):
        if number in sides:
            sides[number].append(_operator(_message(value), name))
        elif number == 3:
            found = _numbers(_message(value))
            source, target = Ref(op=found.get(1, 0), out=found.get(3, 0)), Ref(op=found.get(2, 0), out=found.get(4, 0))
            maps.append((source, target))
    for side, ops in sides.items():
        for at, op in enumerate(ops):
            if any(each.op >= at for each in op.inputs):
                raise ForetraceError(f"{name} has an operator that reads a later one; give the file as TASO wrote it.")
        refs = [pair[side - 1] for pair in maps]
        if any(not 0 <= each.op < len(ops) or each.out >= ops[each.op].outputs for each in refs) or not maps:
            raise ForetraceError(f"{name} maps an output that it does not have; give the file as TASO wrote it.")
    return Pattern(name=name, source=tuple(sides[1]), target=tuple(sides[2]), outputs=tuple(maps))


def _operator(data: bytes, name: str) -> PatternOp:
    kind, inputs, given = 0, [], {}
    for number, value in fields(data):
        if number == 1:
            kind = signed(value)
        elif number == 2:
            found = _numbers(_message(value))
            inputs.append(Ref(op=found.get(1, 0), out=found.get(2, 0)))
        elif number == 3:
            found = _numbers(_message(value))
            given[found.get(1, 0)] = found.get(2, 0)
    if kind not in KINDS:
        raise ForetraceError(f"{name} uses the operator type {kind}, which is not known; leave the rule out.")
    act = given.get(9, 0)
    if act not in ACTS:
        raise ForetraceError(f"{name} uses the activation {act}, which is not known; leave the rule out.")
    return PatternOp(
        kind=KINDS[kind], inputs=tuple(inputs), kernel=(given.get(4, 0), given.get(5, 0)),
        stride=(given.get(6, 1), given.get(7, 1)), same=given.get(8, 0) == 0, act=ACTS[act], rank=given.get(10, 0),
        axis=given.get(11, 0), outputs=given.get(2, 1) if KINDS[kind] == "split" else 1,
    )  # fmt: skip
