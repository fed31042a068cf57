"""All rules by name, and those among them that hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foretrace.plan.rewrite import patterns, rules_conv, rules_group, rules_product, taso
from foretrace.plan.rewrite.rules import GraphView, Maker, Rule
from foretrace.plan.rewrite.shapes import UnfitError
from foretrace.plan.rewrite.terms import Terms
from foretrace.plan.rewrite.verifier import RuleVerdict, verify

_TRIES = 40
RULES: tuple[Rule, ...] = (*rules_conv.RULES, *rules_group.RULES, *rules_product.RULES)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What a file of rules holds, and what it is good for."""

    rules: tuple[Rule, ...]  # that hold
    verdicts: tuple[RuleVerdict, ...]  # of all, in the order of the file
    idle: tuple[str, ...]  # hold, but the normal form of graphs leaves them nothing to match


def imported(path: Path, *, seed: int = 0, examples: int = 3) -> Imported:
    """Return the rules of TASO's file, each held against numbers. Raises ForetraceError where the file is none."""
    rules, verdicts, idle = [], [], []
    for pattern in taso.read(path):
        try:
            rule = patterns.as_rule(pattern)
        except UnfitError as error:
            why = str(error).rstrip(".")
            verdicts.append(RuleVerdict(name=pattern.name, holds=False, examples=0, places=0, worst=0.0, why=why))
            continue
        found = verify(rule, seed=seed, examples=examples)
        verdicts.append(found)
        if found.holds:
            rules.append(rule)
            if _is_idle(rule, seed):
                idle.append(rule.name)
    return Imported(rules=tuple(rules), verdicts=tuple(verdicts), idle=tuple(idle))


def _is_idle(rule: Rule, seed: int) -> bool:
    """Return whether a rule finds nothing even in its own examples."""
    for number in range(_TRIES):
        try:
            graph = rule.sample(Maker(Terms(), random.Random(seed + number)))
        except UnfitError:  # sizes that the rule does not suit
            continue
        return next(rule.places(GraphView(graph)), None) is None
    return True


@cache
def usable() -> tuple[tuple[Rule, ...], tuple[RuleVerdict, ...]]:
    """Return our rules that hold, and what the verifier says of all; held against numbers once per process."""
    return verified(RULES)


def verified(
    rules: Sequence[Rule], *, seed: int = 0, examples: int = 3
) -> tuple[tuple[Rule, ...], tuple[RuleVerdict, ...]]:
    """Return (rules that hold, what the verifier says of all)."""
    verdicts = tuple(verify(rule, seed=seed, examples=examples) for rule in rules)
    return tuple(r for r, v in zip(rules, verdicts, strict=True) if v.holds), verdicts
