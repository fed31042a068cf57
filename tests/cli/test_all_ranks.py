"""`--all-ranks`: simulate, blame, whatif, compare, check, report, export and graph on the joined graph."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foretrace import flow
from foretrace.graph.taskgraph import TaskKind
from foretrace.simulate.ranks import entering_together, parts, shares
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.arguments import parse
from tests.cli.conftest import Answer, Cli
from tests.graph.rank_sets import Job

ASKED = ["simulate", "blame", "check"]


def slow_rank(folder: Path, ranks: int = 3) -> Path:
    """A job whose last rank works 500 µs longer in every step; a transfer takes 40 µs."""
    times = np.full((ranks, 4, 1), 300.0)
    times[-1] = 800.0
    folder.mkdir(exist_ok=True)
    return Job(work_us=times.tolist()).write(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return slow_rank(tmp_path / "run")


def refused(answer: Answer) -> str:
    """The one line of a user's mistake."""
    assert (answer.code, answer.out) == (2, "")
    (line,) = [line for line in answer.err.splitlines() if line]
    assert "Traceback" not in line
    return line


# -- answers ---------------------------------------------------------------------------------------------------


def test_the_replay_of_all_ranks_is_that_of_the_slowest(cli: Cli, run: Path) -> None:
    view = cli("simulate", run, "--all-ranks", "--json").json
    assert view["rank_numbers"] == [0, 1, 2]
    assert view["error"] == 0
    assert view["step_time_s"] == pytest.approx(849e-6, abs=1e-6)
    assert view["next"] == f"foretrace check {run} --all-ranks"
    assert cli("simulate", run, "--json").json["rank_numbers"] == [0]


def test_blame_on_all_ranks_blames_the_slow_one(cli: Cli, run: Path) -> None:
    answer = cli("blame", run, "--all-ranks", "--json").json
    first = answer["rows"][0]
    assert first["name"] == "aten::work"
    assert first["count"] == 3
    assert first["time_s"] == pytest.approx(1400e-6, rel=1e-3)
    assert first["saved_if_10pct_faster_s"] == pytest.approx(80e-6, rel=1e-2)
    assert "(sum of the ranks)" in cli("blame", run, "--all-ranks").out


@pytest.mark.parametrize(
    ("change", "saved_us"),
    [
        ("scale kind=collective by=0.5", 20),
        ("replace-kernel kind=collective time_us=15", 25),
        ("scale op=aten::work rank=2 by=0.5", 400),
        ("scale op=aten::work rank=2 by=0.1", 500),  # the others come last then
        ("scale op=aten::work rank=0 by=0.5", 0),
    ],
)
def test_whatif_on_all_ranks_has_known_answers(cli: Cli, run: Path, change: str, saved_us: float) -> None:
    view = cli("whatif", run, "--all-ranks", "--do", change, "--json").json
    assert view["saved_s"] == pytest.approx(saved_us * 1e-6, abs=2e-8)
    assert view["rank_numbers"] == [0, 1, 2]
    for side in ("before", "after"):
        assert sum(view[f"breakdown_{side}_s"].values()) == pytest.approx(view[f"{side}_s"], abs=1e-8)
    assert view["interval_s"][0] <= view["after_s"] <= view["interval_s"][1]
    assert view["next"].startswith(f"foretrace export {run} --all-ranks --do ")


def test_the_breakdown_is_the_mean_over_the_ranks(cli: Cli, run: Path) -> None:
    """Two of three ranks wait 500 µs for the third, and all transfer 40 µs."""
    view = cli("whatif", run, "--all-ranks", "--do", "scale kind=collective by=0.5", "--json").json
    waits = 2 / 3 * 500e-6
    assert view["breakdown_before_s"]["exposed_communication"] == pytest.approx(waits + 40e-6, abs=2e-6)
    assert view["breakdown_after_s"]["exposed_communication"] == pytest.approx(waits + 20e-6, abs=2e-6)


def test_a_saved_graph_of_all_ranks_is_asked_like_any_other(cli: Cli, run: Path, tmp_path: Path) -> None:
    saved, free = tmp_path / "run.graph", tmp_path / "free.graph"
    assert cli("graph", run, "--all-ranks", "--out", saved).code == 0
    assert cli("graph", saved, "--do", "scale kind=collective by=0", "--out", free).code == 0
    shown = cli("show", saved, "--json").json
    assert shown["ranks"] == 3
    saved_s = shown["collectives"]["saved_if_free_s"]
    assert 30e-6 < saved_s <= 40e-6
    assert cli("show", free, "--json").json["collectives"]["transfer_s_mean"] == 0
    for given in ([], ["--all-ranks"]):
        view = cli("whatif", saved, *given, "--do", "scale kind=collective by=0", "--json").json
        assert view["saved_s"] == pytest.approx(saved_s, abs=1e-12)
    assert cli("compare", saved, free, "--json").json["change_s"] == pytest.approx(-saved_s, abs=1e-12)


def test_compare_looks_at_all_ranks_of_both_sides(cli: Cli, run: Path, tmp_path: Path) -> None:
    even = tmp_path / "even"
    even.mkdir()
    Job(work_us=np.full((3, 4, 1), 300.0).tolist()).write(even)
    assert cli("compare", run, even, "--all-ranks", "--json").json["change_s"] == pytest.approx(-500e-6, abs=2e-8)


def test_check_holds_on_all_ranks(cli: Cli, run: Path) -> None:
    answer = cli("check", run, "--all-ranks", "--json")
    assert answer.code == 0
    found = {each["name"]: each["verdict"] for each in answer.json["findings"]}
    assert found["self-replay"] == found["structural replay"] == "ok"
    assert found["device = 0"] == found["host = 0"] == "skip"


def test_the_page_is_about_all_ranks(cli: Cli, run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert cli("report", run, "--all-ranks", "--do", "scale kind=collective by=0", "--out", page).code == 0
    text = page.read_text()
    assert "rank 2 · " in text
    assert "rank 2 · rank 2" not in text


def test_export_draws_ranks_waits_and_collectives(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert cli("export", run, "--all-ranks", "--out", out).code == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["recorded · all ranks", *(f"recorded · rank {r}" for r in range(3))]
    waits = [e for e in events if e.get("cat") == "wait"]
    assert {e["name"] for e in waits} == {"waits for rank 2"}
    assert {names[e["pid"]] for e in waits} == {"recorded · rank 0", "recorded · rank 1"}
    assert sum(e["dur"] for e in waits) == pytest.approx(2 * 4 * 500, abs=0.1)
    arrows = [e for e in events if e.get("cat") == "collective" and e["ph"] in "sf"]
    assert len(arrows) == 2 * 2 * 4  # two ends, two other ranks, four steps
    assert {names[e["pid"]] for e in arrows if e["ph"] == "s"} == {"recorded · rank 2"}
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert [e["name"] for e in steps] == ["step 5", "step 6", "step 7", "step 8"]
    slices = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "sf"} <= slices  # arrows bind to a drawn lane


# -- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ASKED)
def test_one_rank_of_all_ranks_is_a_contradiction(cli: Cli, run: Path, command: str) -> None:
    line = refused(cli(command, run, "--all-ranks", "--rank", "1"))
    assert line == "foretrace: --all-ranks and --rank 1 contradict each other; give one of them."


@pytest.mark.parametrize("command", ASKED)
def test_a_recording_of_one_rank_is_refused(cli: Cli, cnn: Path, command: str) -> None:
    assert "is a recording of one rank; leave --all-ranks out." in refused(cli(command, cnn, "--all-ranks"))


def test_a_saved_graph_of_one_rank_is_refused(cli: Cli, cnn: Path, tmp_path: Path) -> None:
    saved = tmp_path / "cnn.graph"
    assert cli("graph", cnn, "--out", saved).code == 0
    assert "is a saved graph of one rank; leave --all-ranks out." in refused(cli("blame", saved, "--all-ranks"))


def test_ranks_without_a_common_collective_are_refused(cli: Cli, tmp_path: Path) -> None:
    Job(work_us=np.full((2, 4, 0), 0.0).tolist(), collectives=()).write(tmp_path)
    line = refused(cli("simulate", tmp_path, "--all-ranks"))
    assert line == f"foretrace: no collective ties the 2 ranks of {tmp_path} together; look at one of them with --rank."


def test_techniques_of_one_rank_are_refused(cli: Cli, run: Path) -> None:
    line = refused(cli("whatif", run, "--all-ranks", "--do", "data-parallel workers=4 network=10gbit/50us"))
    assert line.startswith("foretrace: data-parallel: it reckons with one rank, not with a graph of several")
    assert "rank=9 is not in this graph" in refused(cli("whatif", run, "--all-ranks", "--do", "scale rank=9 by=0.5"))


def test_a_missing_folder_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    assert "nowhere" in refused(cli("simulate", tmp_path / "nowhere", "--all-ranks"))


# -- eight real ranks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dlrm(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_data / "traces" / "param" / "dlrm_kineto_8rank"
    return flow.joined(flow.rank_graphs(folder)).save(tmp_path_factory.mktemp("dlrm") / "dlrm.graph")


def waits_s(timeline: Timeline) -> list[float]:
    return [row.wait_s for row in shares(timeline, parts(timeline))]


def test_a_free_network_saves_next_to_nothing(cli: Cli, dlrm: Path) -> None:
    view = cli("whatif", dlrm, "--do", "scale kind=collective by=0", "--json").json
    assert view["saved_s"] == pytest.approx(6.5e-6, abs=0.01e-6)
    told = cli("show", dlrm, "--json").json["collectives"]
    assert view["saved_s"] == pytest.approx(told["saved_if_free_s"], abs=1e-12)


def test_ranks_that_enter_together_take_a_third_less(cli: Cli, dlrm: Path) -> None:
    recorded = flow.load(dlrm)
    together = simulate(entering_together(recorded.graph))
    assert together.step_time_s == pytest.approx(14.39e-3, rel=0.005)
    told = cli("show", dlrm, "--json").json["collectives"]["saved_if_together_s"]
    assert recorded.simulate().step_time_s - together.step_time_s == pytest.approx(told, abs=1e-12)


def test_kernels_twice_as_fast_on_all_ranks_do_not_help_ranks_that_wait_for_launches(dlrm: Path) -> None:
    before = flow.load(dlrm)
    after = before.apply(parse("scale kind=kernel by=0.5"))
    kernels = (before.graph.kind == TaskKind.KERNEL) & ~before.graph.gone
    assert after.graph.dur[kernels].sum() == pytest.approx(before.graph.dur[kernels].sum() / 2, rel=1e-3)
    assert 0 <= before.simulate().step_time_s - after.simulate().step_time_s < 0.01 * before.simulate().step_time_s


def test_only_a_faster_straggler_shortens_the_waits_of_the_others(dlrm: Path) -> None:
    before = flow.load(dlrm)
    waits = np.array(waits_s(before.simulate()))
    straggler = before.apply(parse("scale kind=host rank=7 by=0.5")).simulate()
    assert (np.array(waits_s(straggler))[:7] < waits[:7] - 0.4e-3).all()
    assert straggler.step_time_s < before.simulate().step_time_s - 0.4e-3
    another = before.apply(parse("scale kind=host rank=1 by=0.5")).simulate()
    after = np.array(waits_s(another))
    assert np.delete(after, 1).tolist() == np.delete(waits, 1).tolist()
    assert after[1] > waits[1]
    assert another.step_time_s == before.simulate().step_time_s


def test_techniques_of_one_process_go_through_all_ranks(dlrm: Path) -> None:
    before = flow.load(dlrm)
    for text in ("mixed-precision", "prefetch-data workers=4", "compiled", "faster-device ratio=2 host=0.5"):
        after = before.apply(parse(text))
        assert after.graph.info.collectives == before.graph.info.collectives
        assert parts(after.simulate()).count == 8
        assert after.graph.changes[-1].what.startswith(("on each of 8 ranks: ", "on rank 0: "))
