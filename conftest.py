"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tests.health"]

# Examples of a property, also where it states more (tests/health.py). How long one takes says something about the
# machine: no deadline.
for name, examples in {"quick": 25, "full": 100, "thorough": 2000}.items():
    settings.register_profile(name, deadline=None, max_examples=examples)
settings.load_profile(os.environ.get("FORETRACE_EXAMPLES", "full"))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of two test processes on two cores wait for each other
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and those that a test asks for do not spin meanwhile
os.environ.setdefault("FORETRACE_POISON", "1")  # what a pass leaves unwritten shows, in subprocesses as well

# A process has one server that others are forked from, and what it has imported is settled by whoever starts it. Here
# it always has PyTorch: else, after a test of executor.py, each worker would import it by itself, for three seconds.
# And numba, with what executor.py is given most often, and what tests import whose functions run in such processes.
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "foretrace.training.training",
             "foretrace.training.pipeline.launch", "foretrace.graph.ranks", "foretrace.serving.llm.capacity",
             "foretrace.techniques.distributed.gradient_compression", "foretrace.training.compression.hooks",
             "foretrace.techniques.distributed.partial_backprop", "hypothesis", "tests.gloo_workers")  # fmt: skip
_preload = forkserver.set_forkserver_preload


def preload(names: Sequence[str]) -> None:
    """As asked for, and what many tests need."""
    _preload(["tests.imports_begin", *dict.fromkeys((*PRELOADED, *names)), "tests.imports_end"])


forkserver.set_forkserver_preload = preload  # type: ignore[assignment]


@pytest.fixture(scope="session", autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's calibrations and ledger; subprocesses inherit this.

    Captured operators are shared by all processes of a run of the tests: none is stale, by its name.
    """
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        run = tmp_path_factory.getbasetemp()
        captured = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "operators"
        captured.mkdir(exist_ok=True)
        (cache / "operators").symlink_to(captured)
        patch.setenv("FORETRACE_CACHE", str(cache))
        patch.setenv("FORETRACE_LEDGER", str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"))
        patch.setattr("foretrace.hardware.probe._SECONDS", 0.1)  # that peaks are measured is tested, not how near
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real traces and measurements; it is not part of the project, so tests skip without it."""
    given = os.environ.get("FORETRACE_SHARED_DATA")
    beside = Path(__file__).resolve().parents[1] / "shared" / "data"
    path = Path(given) if given else beside
    if not (path / "traces").is_dir():
        pytest.skip(f"shared data not found at {path}; set FORETRACE_SHARED_DATA to its folder")
    return path
