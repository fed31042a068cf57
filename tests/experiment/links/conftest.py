"""A rig needs root, namespaces and a token bucket; where they are missing, tests skip and say what is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretrace.experiment.links import netns
from foretrace.experiment.processes import Workers
from foretrace.hardware.cluster import parse_link


@pytest.fixture(scope="session")
def able() -> netns.Capability:
    """What this machine can do."""
    found = netns.probe()
    if found.missing:
        pytest.skip(f"no rig here: {'; '.join(found.missing)}")
    return found


@pytest.fixture
def pair(able: netns.Capability) -> Iterator[Workers]:
    """Two workers on a link of 50 Mbit/s."""
    pytest.importorskip("torch")
    with netns.made(2, parse_link("50mbit")) as net, netns.running(net) as workers:
        yield workers
