"""The protocol in small: every part of the page is made, and what it says of staleness is so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import export_lines, import_lines
from foretrace.experiment.links import netns
from foretrace.training.rows import graphs
from foretrace.training.rows.neighbours import policies
from reproductions.graphsnapshot import protocol
from reproductions.graphsnapshot.protocol import NAMES, Setting, in_memory, ledger_rows, on_disk, over_link, staleness

SMALL = Setting(nodes=500, degree=40, fan_out=(4, 4), batch=16, every=3, rounds=2)


@pytest.mark.parametrize("run", [in_memory, on_disk])
def test_samplers_are_measured_and_predicted(run: object) -> None:
    assert callable(run)
    found = run(SMALL)
    assert [each.name for each in found] == list(NAMES)
    by_name = {each.name: each for each in found}
    assert by_name["fcr"].hits == 1 and by_name["plain"].hits == 0
    assert by_name["otf"].read < 0.2 * by_name["plain"].read
    for each in found:
        assert len(each.seconds) == 2 and 0 < each.predicted[1] <= each.predicted[0] <= each.predicted[2]
    pytest.importorskip("torch")
    rows = tuple(ledger_rows(found, SMALL))
    assert import_lines(export_lines(rows), "rows") == rows and len(rows) == len(NAMES)


@pytest.mark.slow("three processes begin, two of them in networks of their own")
def test_lists_are_read_over_a_shaped_link() -> None:
    if missing := netns.probe().missing:
        pytest.skip(f"no rig here: {'; '.join(missing)}")
    found = over_link(SMALL, "200mbit")
    assert [each.store for each in found] == ["link 200mbit"] * len(NAMES)


def test_staleness_is_as_expected() -> None:
    lines = staleness((25, 400), 60, 20).splitlines()
    assert len(lines) == 3 + len(policies())
    for each in lines[2:]:
        for cell in each.split("|")[2:-1]:
            seen, expected = (float(word.strip("()").replace(",", "")) for word in cell.split())
            assert seen == pytest.approx(expected, rel=0.2)


def test_a_network_learns_through_every_cache() -> None:
    pytest.importorskip("torch")
    from reproductions.graphsnapshot.training import accuracy

    data = graphs.planted(nodes=600, edges=9000, communities=3, mixing=0.3, features=16)
    for policy in (None, policies()["otf"]):
        found = accuracy(data, policy, seed=0, epochs=4, num_neighbors=(5, 5), batch_size=20)
        assert found > 0.6, "a third by guessing"


def test_what_a_machine_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(setting: Setting) -> list[protocol.Measured]:
        raise ForetraceError("no rig on this machine.")

    monkeypatch.setattr(protocol, "on_disk", missing)
    monkeypatch.setattr(protocol, "accuracies", lambda folder, **given: "")
    monkeypatch.setattr(protocol, "in_memory", lambda setting: in_memory(SMALL))
    page = protocol.measured(tmp_path, quick=True, keep=False)
    assert "disk is left out: no rig on this machine." in page
    assert np.char.count(page, "| memory, degree 40 | plain |") == 2
