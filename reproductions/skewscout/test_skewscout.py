"""The protocol on trainings of a few steps."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from reproductions.skewscout import protocol


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STEPS", 12)
    monkeypatch.setattr(protocol, "EVERY", 4)


def test_every_skew_and_policy_has_its_row() -> None:
    keys = [each for each in protocol.keys(1, ("iid",)) if each["knob"] in (0, 20, 0.01, protocol.CONTROLLER)]
    cells = {(each["norm"], each["policy"], each["knob"]): protocol.measure(each) for each in keys}
    synchronous = cells["group", "synchronous", 0]
    assert 0 <= synchronous["accuracy"] <= 1
    assert cells["group", "local-sgd", 20]["nbytes"] < cells["group", "dgc", 0.01]["nbytes"] < synchronous["nbytes"]
    assert cells["group", "dgc", protocol.CONTROLLER]["turns"]  # the knob was looked at
