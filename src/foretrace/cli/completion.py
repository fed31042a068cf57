"""What a shell offers behind an option: techniques with their parameters, devices, models, policies.

Nothing is raised here: a shell that completes a word shows no errors, and offers nothing instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from foretrace import fleet as fleets
from foretrace import hardware
from foretrace import zoo as zoos

Offers = Callable[[str], list[str]]


def _quiet(offer: Callable[[str], Iterable[str]]) -> Offers:
    """Return the same, with the beginning held against what is offered; nothing where anything fails."""

    def offered(incomplete: str) -> list[str]:
        with suppress(Exception):
            return [each for each in offer(incomplete) if each.startswith(incomplete)]
        return []

    return offered


@_quiet
def techniques(incomplete: str) -> Iterable[str]:
    """Return names of techniques; behind a name, the parameters that are not yet given: "prefetch-data workers="."""
    from foretrace.techniques.registry import techniques

    known = techniques()
    name, space, given = incomplete.partition(" ")
    if not space:
        return known
    done = given.split(" ")[:-1]
    taken = {each.partition("=")[0] for each in done}
    before = " ".join([name, *done])
    parameters = (each.name for each in known[name].parameters() if each.name not in taken)
    return [f"{before} {each}=" for each in parameters]


@_quiet
def devices(incomplete: str) -> Iterable[str]:
    """Return devices of the catalog, in the case that the user began with."""
    lower = incomplete == incomplete.lower()
    return [each.short.lower() if lower else each.short for each in hardware.catalog()]


@_quiet
def models(incomplete: str) -> Iterable[str]:
    """Return models of the zoo."""
    return zoos.entries()


@_quiet
def decoders(incomplete: str) -> Iterable[str]:
    """Return models of the zoo, and decoders that are estimated without being built."""
    from foretrace.model.decoder_config import DECODERS

    return [*zoos.entries(), *DECODERS]


@_quiet
def policies(incomplete: str) -> Iterable[str]:
    """Return scheduling policies."""
    return fleets.policy_names()
