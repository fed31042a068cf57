"""All policies of the registry, and a few written here, pass the tests of `foretrace.testing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from foretrace.fleet import policies
from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.stepping import View
from foretrace.fleet.workload import SECOND, Int64
from foretrace.testing import PolicyConformance
from tests.fleet.stepping_policies import Packs, Resizes, keeps_most

SLOW = ("sia", "pollux")  # they search or solve in every round
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in policies.names()]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("history") / "gpu_seconds.csv"
    path.write_text("gpu_s\n" + "\n".join(str(100 * 2**at) for at in range(8)) + "\n")
    return path


class TestRegistry(PolicyConformance):
    """Every policy with its own parameters, and speeds of pairs where it puts jobs together."""

    @pytest.fixture(autouse=True, params=NAMES)
    def named(self, request: pytest.FixtureRequest, history: Path) -> None:
        self.name = str(request.param)
        self.parameters = {"gittins": {"history": str(history)}}.get(self.name, {})

    def policy(self) -> Policy:
        return policies.make(self.name, **self.parameters)

    def speeds(self) -> Speeds | None:
        return keeps_most() if int(self.policy().options.get("sharers", 1)) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Rounds(Policy):
    """Decides every ten minutes only, the shortest first."""

    def order(self, view: View, waiting: Int64) -> Sequence[int]:
        return sorted(waiting.tolist(), key=lambda job: (view.remaining_s(job), job))

    def admit(self, view: View, job: int) -> Wait | None:
        return None if view.now_ns % (600 * SECOND) == 0 else Wait(Cause.ROUND)

    def preempt(self, view: View) -> list[int]:
        return view.running.tolist() if view.now_ns % (600 * SECOND) == 0 else []

    def review(self, view: View) -> int:
        return (view.now_ns // (600 * SECOND) + 1) * 600 * SECOND


class TestRounds(PolicyConformance):
    def policy(self) -> Policy:
        return Rounds(name="rounds")


class TestResizes(PolicyConformance):
    def policy(self) -> Policy:
        return Resizes(name="resizes")


class TestPacks(PolicyConformance):
    def policy(self) -> Policy:
        return Packs(name="packs", options={"sharers": 2})

    def speeds(self) -> Speeds:
        return keeps_most()


@dataclass(frozen=True, kw_only=True)
class Starves(Policy):
    """Never serves jobs of one GPU."""

    def admit(self, view: View, job: int) -> Wait | None:
        return Wait(Cause.ROUND) if view.workload.gpus[job] == 1 else None


@dataclass(frozen=True, kw_only=True)
class Guesses(Policy):
    """Not the same twice: it counts how often it was asked in this process."""

    asked = [0]  # noqa: RUF012  # the mistake that the test is to find

    def order(self, view: View, waiting: Int64) -> Sequence[int]:
        self.asked[0] += 1
        return sorted(waiting.tolist(), key=lambda job: hash((job, self.asked[0])))


@pytest.mark.parametrize(
    ("make", "test"),
    [
        (Starves, "test_finishes_everything_that_can_be_held"),
        (Starves, "test_leaves_nobody_waiting_in_an_empty_cluster"),
        (Guesses, "test_gives_the_same_answer_twice"),
    ],
)
def test_finds_what_is_wrong(make: Callable[..., Policy], test: str) -> None:
    class Wrong(PolicyConformance):
        def policy(self) -> Policy:
            return make(name="wrong")

    with pytest.raises(AssertionError):
        getattr(Wrong(), test)()
