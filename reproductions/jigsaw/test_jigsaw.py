"""The JigSaw study: its claims, its page, its draws."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from reproductions.__main__ import main
from reproductions.jigsaw import convergence
from reproductions.jigsaw.section import write
from reproductions.jigsaw.study import (
    JigsawStudy,
    bootstrap,
    mixed_jobs,
    run_study,
)

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"


@pytest.fixture(scope="module")
def study() -> JigsawStudy:
    seen: list[tuple[int, int]] = []
    found = run_study(
        seeds=2, quick=True, progress=lambda done, total: seen.append((done, total)), recordings=[DATA / "cnn.json.gz"]
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)
    return found


def test_the_study_holds_earlier_figures_against_its_own(study: JigsawStudy) -> None:
    verdicts = {row.claim: row.verdict for row in study.claims}
    assert verdicts["one job per GPU: JigSaw equals partial backpropagation alone"] == "confirmed"
    assert verdicts["two jobs per GPU, both effects: 20 to 64 %, longest task first"] == "confirmed"
    assert verdicts["the same with the job first that is ready first"].startswith("refuted: never less")
    assert {row.workers for row in study.recorded} == {2, 4}
    for row in study.packing:
        assert (1 + row.time_sharing) * (1 + row.partial_share) == pytest.approx(1 + row.together)
    costs = [
        r.together
        for r in study.packing
        if (r.dispatch, r.workers, r.exchange, r.sharers) == ("first-ready", 4, 0.3, 2)
    ]
    assert costs == sorted(costs, reverse=True)  # in order of the switch cost
    assert msgspec.json.decode(msgspec.json.encode(study), type=JigsawStudy) == study


def test_the_section_replaces_itself_and_nothing_else(study: JigsawStudy, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nBefore.\n")
    write(study, page)
    once = page.read_text()
    page.write_text(once + "\nAfter.\n")
    write(msgspec.structs.replace(study, date="1999-01-01"), page)
    text = page.read_text()
    assert text.startswith("# Title\n\nBefore.\n") and text.endswith("\nAfter.\n")
    assert text.count("## Figures") == 1 and "1999-01-01" in text and study.date not in text
    assert "first-ready, own GPU, opposed rotation" in text and "| cnn | 4 |" in text
    write(msgspec.structs.replace(study, recorded=()), tmp_path / "new.md")
    assert "No recording was given" in (tmp_path / "new.md").read_text()


def test_one_worker_trains_plainly_and_more_need_more_iterations(study: JigsawStudy) -> None:
    short = convergence._losses(1, 16, 0, 40, partial=False)
    assert short == convergence._losses(1, 16, 0, 40, partial=True)
    assert short[-1] < 0.8 * short[0]
    assert short != convergence._losses(1, 16, 1, 40, partial=False)
    row = study.convergence[0]
    assert (row.workers, row.batch, row.seeds) == (2, 16, 1) and 1 < row.partial <= convergence.LIMIT
    assert row.net == pytest.approx(row.partial / 1.2)


def test_mixes_are_drawn_from_their_seed() -> None:
    assert mixed_jobs(3) == mixed_jobs(3) != mixed_jobs(4)
    assert {each.communication_ns > 0 for each in mixed_jobs(3) if each.workers > 1} == {True}


def test_bootstrap_intervals() -> None:
    assert bootstrap([2.0, 2.0, 2.0]).low == bootstrap([2.0]).high == 2.0
    wide, narrow = (bootstrap(np.random.default_rng(1).normal(5, 1, n).tolist()) for n in (10, 400))
    assert wide.low < wide.mean < wide.high and narrow.high - narrow.low < wide.high - wide.low
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 / 20, rel=0.2)


def test_the_protocol_prints_and_writes(
    study: JigsawStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("reproductions.jigsaw.study.run_study", lambda **_: study)
    assert main(["jigsaw", "--quick", "--write", str(tmp_path / "page.md")]) == 0
    assert capsys.readouterr().out.strip() in (tmp_path / "page.md").read_text()
    assert main(["jigsaw", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=JigsawStudy) == study
