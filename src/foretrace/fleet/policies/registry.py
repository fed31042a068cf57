"""All policies by name: ours, and those of other packages.

A policy is made by a function with keyword parameters that returns a `Policy`. A package adds one by the entry point
group `foretrace.policies`, whose values are such functions::

    [project.entry-points."foretrace.policies"]
    my-policy = "my_package:my_policy"
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import isnan
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.fleet.policy import Policy
from foretrace.names import chosen, keyed
from foretrace.shipped import entry_points

GROUP = "foretrace.policies"
Factory = Callable[..., Policy]

# module of this package: its functions, named as policies are; loaded when asked for, since some need solvers
BUILT_IN = {
    "fifo": "fifo fifo-skip",
    "backfill": "backfill",
    "priority": "priority",
    "sjf": "sjf srtf",
    "las": "las",
    "tiresias": "tiresias gittins",
    "gandiva": "gandiva gandiva-like",
    "themis": "themis",
    "qssf": "qssf",
    "dally": "dally dally-manual dally-las dally-rr",
    "gavel": "gavel-max-min gavel-makespan gavel-ftf allox",
    "pollux": "pollux",
    "sia": "sia",
    "packing": "packing jigsaw",
}


def factories() -> dict[str, Callable[[], Factory]]:
    """Return loader of every policy by name, ours first. Raises ForetraceError for a clashing entry point."""
    found: dict[str, Callable[[], Factory]] = {
        name: partial(_ours, module, name) for module, policies in BUILT_IN.items() for name in policies.split()
    }
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            raise ForetraceError(f"two packages offer a policy named {entry.name}; uninstall {entry.value}.")
        found[entry.name] = entry.load
    return found


def _ours(module: str, name: str) -> Factory:
    made: Factory = getattr(import_module(f"{__package__}.{module}"), name.replace("-", "_"))
    return made


def names() -> tuple[str, ...]:
    """Return names of all policies."""
    return tuple(factories())


def factory(name: str) -> Factory:
    """Return the function that makes this policy. Raises ForetraceError naming the nearest ones."""
    known = factories()
    load = known[chosen(name, known, f"there is no policy {name!r}")]
    try:
        return load()
    except ForetraceError:
        raise
    except Exception as error:
        raise ForetraceError(f"the policy {name} cannot be loaded: {error}.") from error


@dataclass(frozen=True, slots=True)
class PolicyParameter:
    """A parameter of a policy."""

    name: str
    default: str


@dataclass(frozen=True, slots=True)
class Described:
    """A scheduling policy."""

    name: str
    about: str
    parameters: tuple[PolicyParameter, ...]


def described() -> tuple[Described, ...]:
    """List all policies, with the first paragraph of their docstrings."""
    found = []
    for name in names():
        made = factory(name)
        about = " ".join((inspect.getdoc(made) or "").split("\n\n")[0].split())
        parameters = [
            PolicyParameter(each.name.replace("_", "-"), _default(each.default))
            for each in inspect.signature(made).parameters.values()
        ]
        found.append(Described(name, about, tuple(parameters)))
    return tuple(found)


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def make(name: str, **parameters: Any) -> Policy:
    """Return a policy by name with parameters as keywords, checked."""
    made = factory(name)(**parameters)
    if not isinstance(made, Policy):
        raise ForetraceError(f"the policy {name} is no foretrace.fleet.policy.Policy but {type(made).__name__}.")
    made.validate()
    return made


def words_of(parameter: str, text: str, nothing: str) -> list[str]:
    """Return the words of a parameter, quotes as in a shell; `nothing` says what is wrong where there is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ForetraceError(f"`{parameter}={text!r}`: {error}; close the quote.") from None
    if not words:
        raise ForetraceError(f'`{parameter}=""` {nothing}.')
    return words


def parse(text: str) -> Policy:
    """Return a policy from its name and `key=value` words: `dally lease-s=600`.

    Lists are numbers with commas. Raises ForetraceError for an unknown name or key, or a value of the wrong type.
    """
    name, *words = words_of("policy", text, 'names no policy; write for example `policy="dally lease-s=600"`')
    return make(name, **arguments(factory(name), words, f"policy {name}"))


def arguments(function: Callable[..., Any], words: Iterable[str], who: str) -> dict[str, Any]:
    """Return what `key=value` words give a function by keyword, each as its annotation says.

    Raises ForetraceError, in the name of `who`, for an unknown key, one that is missing, or a value of the wrong type.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    known = {each.name: each for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    given = {key: _convert(who, known[key], value) for key, value in keyed(words, known, who, "-").items()}
    missing = [name for name, each in known.items() if each.default is each.empty and name not in given]
    if missing:
        raise ForetraceError(f"{who} needs {missing[0].replace('_', '-')}=.")
    return given


def _convert(who: str, to: inspect.Parameter, value: str) -> Any:
    kind = to.annotation
    try:
        if kind is bool:
            return {"yes": True, "true": True, "no": False, "false": False}[value.lower()]
        if kind in (int, float):
            number = kind(value)
            if isnan(number):
                raise ValueError(value)
            return number
        if kind == tuple[float, ...]:
            return tuple(float(each) for each in value.split(","))
        if kind == tuple[str, ...]:
            return tuple(each for each in value.split(",") if each)
    except (ValueError, KeyError):
        wanted = {bool: "yes or no", int: "a whole number", float: "a number"}.get(kind, "numbers with commas")
        raise ForetraceError(f"{who}: {to.name.replace('_', '-')}={value} is not {wanted}.") from None
    return value
