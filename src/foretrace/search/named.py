"""`search_named`: a search by the strategy that a user names; costs are logarithms of seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from foretrace.errors import ForetraceError
from foretrace.names import question, resolve
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.hybrid import Hybrid
from foretrace.search.minimise import Found, minimise
from foretrace.search.reinforcement import DQN, REINFORCE
from foretrace.search.space import Point, Problem
from foretrace.search.strategies import CMAES, MCMC, Evolution, RandomSearch
from foretrace.search.strategy import SearchStrategy

# Costs are logarithms: a Markov chain accepts what is 2 % worse with probability 1/e.
REFINERS: dict[str, SearchStrategy] = {
    "bayes": ConstrainedBayes(), "cmaes": CMAES(), "dqn": DQN(), "evolution": Evolution(),
    "mcmc": MCMC(beta=50.0), "reinforce": REINFORCE(),
}  # fmt: skip
_NEAR: dict[str, SearchStrategy] = {"cmaes": CMAES(sigma=0.05), "reinforce": REINFORCE(sigma=0.05)}
_HYBRID, _SHARE = "hybrid:", 4  # a quarter of the calls is learned from
NAMES = ("random", *REFINERS, *(_HYBRID + each for each in REFINERS))


def strategy_named(name: str, calls: int) -> SearchStrategy:
    """Return the strategy for costs that are logarithms, in so many calls, lessons included. Raises ForetraceError."""
    found = resolve(name, NAMES)
    if not found or name.count(":") > 1:
        raise ForetraceError(f"`strategy={name}` must be one that there is; {question(name, NAMES)}")
    if found == "random":
        return RandomSearch()
    refiner = found.removeprefix(_HYBRID)
    if refiner == found:
        return REFINERS[found]
    return Hybrid(refiner=REFINERS[refiner], near=_NEAR.get(refiner), lessons=max(calls // _SHARE, 1))


@dataclass(frozen=True, kw_only=True)
class NamedSearch(Generic[Point]):
    """What a strategy found."""

    strategy: str
    found: Found[Point]


def search_named(problem: Problem[Point], strategy: str, *, calls: int, seed: int = 0) -> NamedSearch[Point]:
    """Search in so many calls, those that are learned from included. Raises ForetraceError for an unknown strategy."""
    by = strategy_named(strategy, calls)
    return NamedSearch(strategy=strategy, found=minimise(problem, strategy=by, calls=calls, seed=seed))
